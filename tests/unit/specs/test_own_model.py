"""`--set model.path=` of a known family gives the spec the facts of that folder's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.tiny_model import config_json
from model_specs.errors import ArtifactError, SpecError
from model_specs.families.decoder import parameter_shapes
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.model_spec import ModelSpec
from model_specs.overrides import apply_overrides
from model_specs.registry import check_config, load_recipe, model_from, spec_from_config

SPEC = load_recipe("tiny_cpu")
WIDE = {"num_layers": 3, "hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
OTHERS = {
    "qwen2": SPEC.model.model_copy(update=WIDE),
    "llama": SPEC.model.model_copy(
        update={**WIDE, "family": "llama", "qkv_bias": False, "rope_theta": 5e5}
    ),
    "qwen3": SPEC.model.model_copy(
        update={
            **WIDE,
            "family": "qwen3",
            "qkv_bias": False,
            "qk_norm": True,
            "head_dim": 32,
            "tie_word_embeddings": False,
        }
    ),
}


def _folder(folder: Path, model: ModelSpec, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(model) | changes))
    return folder


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_the_facts_of_an_own_model_are_those_of_its_config(family: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "mine", OTHERS[family])
    spec = apply_overrides(SPEC, (f"model.path={folder}",))
    assert spec.model == OTHERS[family].model_copy(update={"path": str(folder)})
    assert spec.model == model_from(str(folder))
    assert trajectory_fingerprint(spec) != trajectory_fingerprint(SPEC)
    assert spec.model_copy(update={"model": SPEC.model}) == SPEC


def test_the_order_of_overrides_does_not_matter_and_a_fact_can_be_set_too(tmp_path: Path) -> None:
    folder = _folder(tmp_path, OTHERS["qwen2"])
    overrides = (f"model.path={folder}", "model.weights_digest=abc", "optimizer.lr=0.5")
    spec = apply_overrides(SPEC, overrides)
    assert spec == apply_overrides(SPEC, overrides[::-1])
    assert (spec.model.num_layers, spec.model.weights_digest, spec.optimizer.lr) == (3, "abc", 0.5)


def test_the_same_model_elsewhere_is_the_same_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path / "here", SPEC.model)
    monkeypatch.chdir(tmp_path)
    spec = apply_overrides(SPEC, ("model.path=here",))
    assert spec.model.path == str(tmp_path / "here")  # absolute: an engine has its own folder
    assert trajectory_fingerprint(spec) == trajectory_fingerprint(SPEC)


def test_a_spec_whose_weights_are_known_keeps_its_facts(tmp_path: Path) -> None:
    resolved = SPEC.model_copy(
        update={"model": SPEC.model.model_copy(update={"weights_digest": "0" * 32})}
    )
    same = _folder(tmp_path / "same", SPEC.model)
    moved = apply_overrides(resolved, (f"model.path={same}",))
    assert moved.model == resolved.model.model_copy(update={"path": str(same)})
    other = _folder(tmp_path / "other", OTHERS["qwen2"])
    with pytest.raises(SpecError, match=r"num_layers: spec 2, config\.json 3"):
        apply_overrides(resolved, (f"model.path={other}",))


def test_an_unknown_family_lists_the_known_ones(tmp_path: Path) -> None:
    folder = _folder(tmp_path, SPEC.model, model_type="mamba")
    with pytest.raises(SpecError, match=r"'mamba' is not supported; .*llama, qwen2, qwen3"):
        apply_overrides(SPEC, (f"model.path={folder}",))


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is no folder .*hf://org/name@revision"):
        apply_overrides(SPEC, (f"model.path={tmp_path}/nowhere",))
    with pytest.raises(ArtifactError, match=r"config\.json does not exist"):
        apply_overrides(SPEC, (f"model.path={tmp_path}",))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="a list, not an object"):
        apply_overrides(SPEC, (f"model.path={tmp_path}",))


def test_a_model_of_the_hub_is_pinned_to_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = _folder(tmp_path / commit, OTHERS["llama"])
    asked: list[tuple[str, str, str]] = []

    def fake(repository: str, name: str, *, revision: str) -> str:
        asked.append((repository, name, revision))
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fake)
    spec = apply_overrides(SPEC, ("model.path=hf://org/name@dev",))
    assert asked == [("org/name", "config.json", "dev")]
    assert spec.model == OTHERS["llama"].model_copy(update={"path": f"hf://org/name@{commit}"})


def test_qwen3_has_norms_on_query_and_key_heads() -> None:
    model = OTHERS["qwen3"]
    shapes = parameter_shapes(model)
    assert shapes["model.layers.2.self_attn.q_norm.weight"] == (32,)
    assert shapes["model.layers.2.self_attn.k_norm.weight"] == (32,)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 96)
    assert not [name for name in shapes if name.endswith(".bias")]
    assert not [name for name in parameter_shapes(OTHERS["qwen2"]) if "q_norm" in name]
    check_config(model, config_json(model))
    with pytest.raises(SpecError, match=r"qk_norm: spec False, config\.json True"):
        check_config(model.model_copy(update={"qk_norm": False}), config_json(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: needs False"),
        ({"use_sliding_window": True}, "use_sliding_window: needs False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_scaling: needs"),
    ],
)
def test_what_qwen3_may_not_ask_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_from_config(config_json(OTHERS["qwen3"]) | changes, "folder")


def test_a_qwen3_config_without_head_dim_means_128() -> None:
    config = config_json(OTHERS["qwen3"])
    del config["head_dim"]
    assert spec_from_config(config, "folder").head_dim == 128
