"""Qwen3 (dense): no bias, and an RMSNorm on every query and key head before the rope.

`attention_bias=true` is refused: as in Llama it also puts a bias on the output projection, which
`ModelSpec.qkv_bias` does not describe. Sliding windows are refused. A config without `head_dim`
means 128 here, whatever `hidden_size / num_attention_heads` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.families.decoder import (
    Difference,
    common_refusals,
    config_facts,
    fact_differences,
    sliding_window_refusals,
    spec_from_facts,
)
from model_specs.model_spec import ModelSpec

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"

DEFAULT_HEAD_DIM = 128
"""What transformers takes when a config of this family names none."""


def refusals(config: Mapping[str, Any]) -> list[Difference]:
    """Return the settings of `config` that are not supported."""
    found = common_refusals(config) + sliding_window_refusals(config)
    if config.get("attention_bias", False):
        found.append(("attention_bias", False, config["attention_bias"]))
    return found


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ModelSpec` field -> value as `config` states it."""
    bias = bool(config.get("attention_bias", False))
    found = config_facts(config, qkv_bias=bias, qk_norm=True)
    if config.get("head_dim") is None:
        found["head_dim"] = DEFAULT_HEAD_DIM
    return found


def from_config(config: Mapping[str, Any], path: str) -> ModelSpec:
    """Return the spec that `config` (the parsed config.json of `path`) describes.

    Raises:
        SpecError: Naming every setting that is missing or not supported.
    """
    return spec_from_facts("qwen3", path, facts(config), refusals(config))


def expected_config_differences(spec: ModelSpec, config: Mapping[str, Any]) -> list[Difference]:
    """Return (field, spec's value, config's value) for each that differs or is refused."""
    return fact_differences(spec, facts(config), refusals(config))
