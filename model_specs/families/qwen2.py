"""Qwen2 and Qwen2.5: query, key and value always have a bias; sliding windows are refused."""

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

MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"


def _refusals(config: Mapping[str, Any]) -> list[Difference]:
    return common_refusals(config) + sliding_window_refusals(config)


def from_config(config: Mapping[str, Any], path: str) -> ModelSpec:
    """Return the spec that `config` (the parsed config.json of `path`) describes.

    Raises:
        SpecError: Naming every setting that is missing or not supported.
    """
    facts = config_facts(config, qkv_bias=True)
    return spec_from_facts("qwen2", path, facts, _refusals(config))


def expected_config_differences(spec: ModelSpec, config: Mapping[str, Any]) -> list[Difference]:
    """Return (field, spec's value, config's value) for each that differs or is refused."""
    return fact_differences(spec, config_facts(config, qkv_bias=True), _refusals(config))
