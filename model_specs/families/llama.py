"""Llama-shaped models (Llama 2 and 3 without rope scaling, SmolLM2): no bias anywhere.

`attention_bias=true` is refused: in this family it also puts a bias on the output projection, which
`ModelSpec.qkv_bias` does not describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.families.decoder import (
    Difference,
    common_refusals,
    config_facts,
    fact_differences,
    spec_from_facts,
)
from model_specs.model_spec import ModelSpec

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"


def _refusals(config: Mapping[str, Any]) -> list[Difference]:
    refusals = common_refusals(config)
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name, False):
            refusals.append((name, False, config[name]))
    if config.get("pretraining_tp", 1) != 1:
        refusals.append(("pretraining_tp", 1, config["pretraining_tp"]))
    return refusals


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    facts = config_facts(config, qkv_bias=bool(config.get("attention_bias", False)))
    if facts["num_key_value_heads"] is None:
        facts["num_key_value_heads"] = facts["num_attention_heads"]  # the family's default
    return facts


def from_config(config: Mapping[str, Any], path: str) -> ModelSpec:
    """Return the spec that `config` (the parsed config.json of `path`) describes.

    Raises:
        SpecError: Naming every setting that is missing or not supported.
    """
    return spec_from_facts("llama", path, _facts(config), _refusals(config))


def expected_config_differences(spec: ModelSpec, config: Mapping[str, Any]) -> list[Difference]:
    """Return (field, spec's value, config's value) for each that differs or is refused."""
    return fact_differences(spec, _facts(config), _refusals(config))
