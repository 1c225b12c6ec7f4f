"""What the dense decoder families share: reading `config.json`, names and shapes of the weights.

A config is read into the fields of `ModelSpec` (the *facts*) and into *refusals*: settings that
the shared ops do not implement, each with the value that would be accepted. Both config layouts
are read: `rope_theta` and `torch_dtype` at the top level, and transformers 5's `rope_parameters`
and `dtype`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from model_specs.errors import SpecError
from model_specs.model_spec import ModelSpec, MoeModelSpec

Difference = tuple[str, Any, Any]
"""(field, value that the spec or the shared ops need, value in the config)."""

DEFAULT_ROPE_THETA = 10000.0
"""What transformers takes when a config names none."""

_NOT_READ = {
    "quantization_config": "quantised checkpoint",
    "compression_config": "quantised checkpoint",
    "vision_config": "multimodal",
    "audio_config": "multimodal",
    "num_nextn_predict_layers": "multi-token prediction",
    "mtp_num_hidden_layers": "multi-token prediction",
    "num_mtp_layers": "multi-token prediction",
    "num_mtp_modules": "multi-token prediction",
}
"""Key of a config.json -> what the folder holds beside, or instead of, a plain decoder's weights.

None, 0 and an empty group mean that there is none of it."""

_CONFIG_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}


def _rope(config: Mapping[str, Any]) -> tuple[float, str | None]:
    """Return (theta, canonical JSON of a scaling that is not the default, else None)."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", DEFAULT_ROPE_THETA))
    if any(isinstance(value, Mapping) for value in parameters.values()):  # one a kind of layer
        return theta, json.dumps(parameters, sort_keys=True, separators=(",", ":"))
    for candidate in (parameters, scaling):
        kind = candidate.get("rope_type", candidate.get("type", "default"))
        partial = candidate.get("partial_rotary_factor", 1.0)
        if kind != "default" or partial != 1.0:
            extra = {key: value for key, value in candidate.items() if key != "rope_theta"}
            return theta, json.dumps(extra, sort_keys=True, separators=(",", ":"))
    return theta, None


def config_facts(
    config: Mapping[str, Any], *, qkv_bias: bool, qk_norm: bool = False
) -> dict[str, Any]:
    """Return `ModelSpec` field -> value as `config` states it; None where it states nothing."""
    facts: dict[str, Any] = {field: config.get(name) for field, name in _CONFIG_NAMES.items()}
    heads, hidden = facts["num_attention_heads"], facts["hidden_size"]
    facts["num_key_value_heads"] = config.get("num_key_value_heads")
    facts["head_dim"] = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    facts["rope_theta"], facts["rope_scaling"] = _rope(config)
    facts["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    facts["qkv_bias"] = qkv_bias
    facts["qk_norm"] = qk_norm
    facts["dtype"] = config.get("dtype", config.get("torch_dtype"))
    return facts


def common_refusals(config: Mapping[str, Any]) -> list[Difference]:
    """Return the settings of any family that the shared ops do not implement."""
    refusals: list[Difference] = []
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        refusals.append(("hidden_act", "silu", activation))
    if (partial := config.get("partial_rotary_factor")) not in (None, 1.0):
        refusals.append(("partial_rotary_factor", 1.0, partial))
    theta, scaling = _rope(config)
    if scaling is not None:
        refusals.append(("rope_scaling", None, scaling))
    if config.get("rope_theta", theta) != theta:
        refusals.append(("rope_theta beside rope_parameters", theta, config["rope_theta"]))
    dropout = config.get("attention_dropout", 0.0)
    if dropout:
        refusals.append(("attention_dropout", 0.0, dropout))
    for name, what in _NOT_READ.items():
        if value := config.get(name):
            is_number = isinstance(value, int)
            refusals.append((f"{name} ({what})", 0 if is_number else None, _kind_of(value)))
    return refusals


def _kind_of(value: Any) -> Any:
    """Return what a group of a config calls itself, for a message; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    return value.get("quant_method") or value.get("model_type") or sorted(value)


def sliding_window_refusals(config: Mapping[str, Any]) -> list[Difference]:
    """Return the settings of the Qwen families that ask for attention over a window."""
    refusals: list[Difference] = []
    if config.get("use_sliding_window", False):
        refusals.append(("use_sliding_window", False, config["use_sliding_window"]))
    windowed = [kind for kind in config.get("layer_types") or () if kind != "full_attention"]
    if windowed:
        refusals.append(("layer_types", "full_attention", windowed[0]))
    return refusals


def spec_from_facts(
    family: Literal["qwen2", "llama", "qwen3", "qwen3_moe"],
    path: str,
    facts: Mapping[str, Any],
    refusals: list[Difference],
) -> ModelSpec:
    """Return the `ModelSpec` of these facts.

    Raises:
        SpecError: Naming every refusal, or every fact that is missing or of the wrong kind.
    """
    if refusals:
        raise SpecError(f"{path}/config.json: not supported: {describe(refusals, left='needs')}")
    try:
        kind = MoeModelSpec if "moe" in facts else ModelSpec
        return kind(family=family, path=path, **facts)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}={item['input']!r}: {item['msg']}"
            for item in error.errors()
        )
        raise SpecError(
            f"{path}/config.json does not describe a {family} model: {problems}"
        ) from error


def fact_differences(
    spec: ModelSpec, facts: Mapping[str, Any], refusals: list[Difference]
) -> list[Difference]:
    """Return every fact that differs from the spec, then the refusals that are not among them."""
    differences = [
        (field, getattr(spec, field), value)
        for field, value in facts.items()
        if not _same_fact(field, getattr(spec, field), value)
    ]
    named = {field for field, _, _ in differences}
    return differences + [refusal for refusal in refusals if refusal[0] not in named]


def _same_fact(field: str, wanted: Any, found: Any) -> bool:
    """Compare one fact; `rms_norm_eps` in float32, in which the shared op adds it.

    Converted folders write it as 9.999999747378752e-06, the float32 nearest to 1e-05.
    """
    if field == "rms_norm_eps" and isinstance(wanted, float) and isinstance(found, float):
        return struct.pack("<f", wanted) == struct.pack("<f", found)
    return bool(wanted == found)


def describe(differences: list[Difference], *, left: str) -> str:
    """Return the differences as one line of text."""
    return "; ".join(
        f"{field}: {left} {wanted!r}, config.json {found!r}" for field, wanted, found in differences
    )


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face name -> shape of each stored parameter, sorted by name.

    A tied head is an alias of the embedding and is not listed. Linear weights are [out, in].
    Experts have the names of the checkpoint's files, one tensor each.
    """
    query = spec.num_attention_heads * spec.head_dim
    key_value = spec.num_key_value_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            shapes[f"{prefix}self_attn.{name}.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        mlps = {prefix + "mlp.": inner}
        if isinstance(spec, MoeModelSpec):
            shapes[prefix + "mlp.gate.weight"] = (spec.num_experts, hidden)
            mlps = {
                f"{prefix}mlp.experts.{expert}.": spec.moe.intermediate_size
                for expert in range(spec.num_experts)
            }
        for mlp, width in mlps.items():
            shapes[mlp + "gate_proj.weight"] = (width, hidden)
            shapes[mlp + "up_proj.weight"] = (width, hidden)
            shapes[mlp + "down_proj.weight"] = (hidden, width)
    return dict(sorted(shapes.items()))
