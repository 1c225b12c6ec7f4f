"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every layer.

Layers without experts (`decoder_sparse_step`, `mlp_only_layers`) are refused, and so is what is
refused of Qwen3. `intermediate_size` is that of such layers and is only compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from model_specs.errors import SpecError
from model_specs.families import qwen3
from model_specs.families.decoder import Difference, fact_differences, spec_from_facts
from model_specs.model_spec import ModelSpec, MoeSpec

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"

_CONFIG_NAMES = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "normalize_weights": "norm_topk_prob",
}


def _refusals(config: Mapping[str, Any]) -> list[Difference]:
    refusals = qwen3.refusals(config)
    for name, accepted in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(name, accepted) != accepted:
            refusals.append((name, accepted, config[name]))
    return refusals


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = {field: config.get(name) for field, name in _CONFIG_NAMES.items()}
    if any(value is None for value in experts.values()):
        return {**qwen3.facts(config), "moe": experts}
    try:
        found = MoeSpec.model_validate(experts)
    except ValidationError as error:
        raise SpecError(f"config.json: {error.errors()[0]['msg']}") from error
    return {**qwen3.facts(config), "moe": found}


def from_config(config: Mapping[str, Any], path: str) -> ModelSpec:
    """Return the spec that `config` (the parsed config.json of `path`) describes.

    Raises:
        SpecError: Naming every setting that is missing or not supported.
    """
    return spec_from_facts("qwen3_moe", path, _facts(config), _refusals(config))


def expected_config_differences(spec: ModelSpec, config: Mapping[str, Any]) -> list[Difference]:
    """Return (field, spec's value, config's value) for each that differs or is refused."""
    return fact_differences(spec, _facts(config), _refusals(config))
