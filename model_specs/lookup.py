"""Completes a spec by what its values point to: a model's config.json, own code, a template file.

Everything here happens before a run starts and is written into the spec, so that what was found is
identity and can be checked when the spec is read again.

Usage::

    model = own_model(spec, "/models/my-qwen2")     # facts from config.json; None if not needed
    spec = looked_up(spec)                          # own reward digested, template file read
"""

from __future__ import annotations

import logging
from pathlib import Path

from model_specs.errors import SpecError
from model_specs.model_spec import ModelSpec
from model_specs.registry import check_config, spec_from_config
from model_specs.run_spec import DataSpec, EvalSet, RewardSpec, RunSpec
from model_specs.sources import GENERATED_PREFIX, read_config
from model_specs.user_code import locate

logger = logging.getLogger("lockstep")


def own_model(spec: RunSpec, source: str) -> ModelSpec | None:
    """Return the model that `spec` has once its path is `source`; None for a generated model.

    Raises:
        SpecError: The model is not supported, or `spec` already names weights and the folder's
            config.json is another model.
        ArtifactError: There is no readable config.json, or the hub cannot be reached.
    """
    if source.startswith(GENERATED_PREFIX):
        return None
    path, config = read_config(source)
    if spec.model.weights_digest is not None:
        check_config(spec.model, config, where=f"{source}: config.json")
        return spec.model.model_copy(update={"path": path})
    model = spec_from_config(config, path)
    logger.info(
        "model %s: %s, %d layers of %d, %d heads of %d with %d key-value heads, vocabulary %d, %s",
        path,
        model.family,
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.head_dim,
        model.num_key_value_heads,
        model.vocab_size,
        model.dtype,
    )
    return model


def looked_up(spec: RunSpec, *, is_new_source: bool = False) -> RunSpec:
    """Return `spec` with own code digested and a chat template file read.

    Args:
        spec: A validated spec.
        is_new_source: `data.source` was just set, so a relative path is one from this folder.

    Raises:
        SpecError: Own code is not there or is not what the spec names, or a template file is
            missing.
    """
    reward, data = _reward(spec.reward), _data(spec.data, is_new_source=is_new_source)
    evals = tuple(_eval_set(chosen) for chosen in spec.plan.evals)
    if reward == spec.reward and data == spec.data and evals == spec.plan.evals:
        return spec
    plan = spec.plan.model_copy(update={"evals": evals})
    return spec.model_copy(update={"reward": reward, "data": data, "plan": plan})


def _eval_set(chosen: EvalSet) -> EvalSet:
    """An absolute source stays as it is, so a spec that is read again is not changed."""
    update: dict[str, object] = {}
    if chosen.source is not None:
        update["source"] = _resolved(chosen.source)
    if chosen.reward is not None:
        update["reward"] = _reward(chosen.reward)
    return chosen.model_copy(update=update)


def _reward(reward: RewardSpec) -> RewardSpec:
    if not reward.is_own_code:
        return reward
    code = locate(reward.name, recorded_file=reward.source)
    if reward.digest not in (None, code.digest):
        raise SpecError(
            f"reward {code.name}: its sources at {code.file} have digest {code.digest}, but the "
            f"spec was made with {reward.digest}; restore them, or set reward.digest=null to go on "
            "as another trajectory"
        )
    return reward.model_copy(update={"name": code.name, "source": code.file, "digest": code.digest})


def _data(data: DataSpec, *, is_new_source: bool) -> DataSpec:
    update: dict[str, str] = {}
    if is_new_source:
        update["source"] = _resolved(data.source)
    template = data.chat_template
    if template is not None and "{" not in template:
        file = Path(template).expanduser()
        if not file.is_file():
            raise SpecError(
                f"data.chat_template={template!r} holds no {{ and names no file "
                f"({file.resolve()}); give a Jinja text or the path of one"
            )
        update["chat_template"] = file.read_text(encoding="utf-8")
    return data.model_copy(update=update) if update else data


def _resolved(source: str) -> str:
    """A path that exists, from this folder, as an absolute one."""
    place = Path(source).expanduser()
    if source.startswith(GENERATED_PREFIX) or not place.exists():
        return source
    return str(place.resolve())
