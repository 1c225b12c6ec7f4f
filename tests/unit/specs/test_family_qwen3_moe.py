"""Qwen3-MoE: facts read from its config.json, what is refused, and names of the experts."""

from __future__ import annotations

from typing import Any

import pytest

from engines.checkpoint.tiny_model import config_json
from model_specs.errors import SpecError
from model_specs.families.decoder import parameter_shapes
from model_specs.fingerprint import flattened, trajectory_fingerprint
from model_specs.model_spec import ModelSpec, MoeModelSpec, MoeSpec
from model_specs.overrides import apply_overrides
from model_specs.recipes.tiny_cpu import TINY_MODEL, recipe
from model_specs.registry import check_config, spec_from_config
from model_specs.run_spec import RunSpec

MOE = MoeModelSpec(
    **{**TINY_MODEL.model_dump(), "family": "qwen3_moe", "qkv_bias": False, "qk_norm": True},
    moe=MoeSpec(num_experts=4, experts_per_token=2, intermediate_size=48, normalize_weights=True),
)


def config(**changes: Any) -> dict[str, Any]:
    return {**config_json(MOE), **changes}


def test_config_there_and_back_is_the_same_spec() -> None:
    assert spec_from_config(config(), MOE.path) == MOE
    check_config(MOE, config())


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("num_experts", 8, "moe"),
        ("num_experts_per_tok", 1, "moe"),
        ("moe_intermediate_size", 96, "moe"),
        ("norm_topk_prob", False, "moe"),
        ("head_dim", 64, "head_dim"),
    ],
)
def test_every_differing_fact_is_refused_by_name(name: str, value: Any, field: str) -> None:
    with pytest.raises(SpecError, match=field) as refused:
        check_config(MOE, config(**{name: value}))
    assert str(value) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("decoder_sparse_step", 2), ("mlp_only_layers", [0]), ("attention_bias", True)],
)
def test_layers_without_experts_and_biases_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=name):
        spec_from_config(config(**{name: value}), "folder")


def test_a_config_without_experts_is_refused_with_the_missing_field() -> None:
    without = {name: value for name, value in config().items() if name != "num_experts"}
    with pytest.raises(SpecError, match="num_experts"):
        spec_from_config(without, "folder")


def test_experts_are_named_one_by_one_as_in_checkpoint_files() -> None:
    shapes = parameter_shapes(MOE)
    assert shapes["model.layers.1.mlp.gate.weight"] == (4, 128)
    assert shapes["model.layers.1.mlp.experts.3.gate_proj.weight"] == (48, 128)
    assert shapes["model.layers.0.mlp.experts.0.down_proj.weight"] == (128, 48)
    assert not any("mlp.gate_proj" in name for name in shapes)
    assert sum(".experts." in name for name in shapes) == 2 * 4 * 3


def test_experts_are_set_from_the_command_line_and_are_identity() -> None:
    dense = recipe()
    settings = (
        "model.family=qwen3_moe",
        "model.moe.num_experts=4",
        "model.moe.experts_per_token=2",
        "model.moe.intermediate_size=48",
        "model.moe.normalize_weights=true",
    )
    spec = apply_overrides(dense, settings)
    assert isinstance(spec.model, MoeModelSpec)
    assert spec.model.moe == MOE.moe
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    other = apply_overrides(spec, ("model.moe.num_experts=8",))
    assert trajectory_fingerprint(other) != trajectory_fingerprint(spec)
    with pytest.raises(SpecError, match=r"model\.moe\.num_experts=0"):
        apply_overrides(spec, ("model.moe.num_experts=0",))


def test_a_dense_model_has_no_fields_of_experts() -> None:
    assert isinstance(recipe().model, ModelSpec)
    assert not any("moe" in name for name in flattened(recipe()))


def test_a_family_without_its_experts_and_experts_without_their_family_are_refused() -> None:
    with pytest.raises(SpecError, match=r"family qwen3_moe with 0 experts: set model\.moe"):
        apply_overrides(recipe(), ("model.family=qwen3_moe",))
    with pytest.raises(ValueError, match="family qwen3 with 4 experts"):
        MoeModelSpec.model_validate({**MOE.model_dump(), "family": "qwen3"})
    with pytest.raises(ValueError, match="experts_per_token=5 of num_experts=4"):
        MoeSpec(num_experts=4, experts_per_token=5, intermediate_size=8, normalize_weights=True)
