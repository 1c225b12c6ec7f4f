"""Generates the tiny model: a Hugging Face folder from a seed, bitwise the same on every machine.

Weights come from SHAKE-256 of (seed, name) through additions, multiplications and one rounding, all
exactly defined by IEEE 754; no generator or math library takes part. Norm weights differ from 1 and
biases from 0, so that an op that forgets one of them shows. The tokenizer is byte-level BPE without
merges, so one token a character; text outside of `CHARACTERS` has no token.

Usage::

    write_tiny_model("model", load_recipe("tiny_cpu").model, seed=0)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model_specs.errors import SpecError
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec, MoeModelSpec
from model_specs.registry import FAMILIES

PAD, UNKNOWN, START, END = "<|pad|>", "<|unknown|>", "<|start|>", "<|end|>"
SPECIAL_TOKENS = (PAD, UNKNOWN, START, END)
"""Token ids 0 to 3; END ends a message and is the end-of-sequence token."""
CHARACTERS = tuple(chr(code) for code in (10, *range(32, 127)))
"""The 96 characters that have a token: line feed and printable ASCII, ids from 4."""
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)

EMBEDDING_STD = 0.05
"""Standard deviation of the embedding rows: small, so that the first policy is near uniform."""
NORM_SPREAD = 0.125
"""Norm weights are uniform in 1 +- this."""
BIAS_SPREAD = 0.25
"""Biases are uniform in +- this."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: str | Path, model: ModelSpec, *, seed: int = 0) -> None:
    """Write config, weights, tokenizer and generation config of `model` into `folder`.

    Raises:
        SpecError: When the vocabulary of `model` is smaller than the tokenizer's 100 tokens, or it
            has a rope scaling.
    """
    if model.vocab_size < VOCABULARY_SIZE:
        raise SpecError(
            f"model.vocab_size={model.vocab_size}: the character tokenizer has {VOCABULARY_SIZE} "
            "tokens; choose at least that"
        )
    if model.rope_scaling is not None:
        raise SpecError(f"model.rope_scaling={model.rope_scaling!r}: a generated model has none")
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config_json(model))
    _write_json(out / "generation_config.json", {"eos_token_id": 3, "pad_token_id": 0})
    _write_json(out / "tokenizer.json", _tokenizer_json())
    _write_json(out / "tokenizer_config.json", _tokenizer_config(model))
    tensors = {
        name: (model.dtype, shape, _stored(parameter_values(name, shape, seed=seed), model.dtype))
        for name, shape in parameter_shapes(model).items()
    }
    (out / "model.safetensors").write_bytes(safetensors_bytes(tensors))


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """Return a safetensors file of name -> (dtype, shape, little-endian data), in the given order.

    Written here by its format (8 bytes of header length, JSON header, data) because the library's
    own byte-level writer has changed its interface between versions, and the bytes are digested.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        end = offset + len(data)
        short = {"bfloat16": "BF16", "float32": "F32"}[dtype]
        header[name] = {"dtype": short, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts aligned
    data = b"".join(data for _, _, data in tensors.values())
    return len(encoded).to_bytes(8, "little") + encoded + data


def parameter_values(name: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """Return the float32 values of one parameter: uniform around 1 (norms) or 0 (all others).

    Linear weights are uniform with variance 1 / fan-in, as is common; the embedding has standard
    deviation `EMBEDDING_STD`.
    """
    key = f"lockstep-tiny-1/{seed}/{name}".encode()
    count = math.prod(shape)
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * count), dtype="<u4")
    unit = ((words >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-23 - 1.0  # (-1, 1), exact
    if name.endswith("norm.weight"):
        values = 1.0 + NORM_SPREAD * unit
    elif name.endswith(".bias"):
        values = BIAS_SPREAD * unit
    elif name in ("model.embed_tokens.weight", "lm_head.weight"):
        values = EMBEDDING_STD * math.sqrt(3.0) * unit
    else:
        values = math.sqrt(3.0 / shape[1]) * unit
    return values.astype(np.float32).reshape(shape)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 patterns (uint16) of finite float32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype("<u2")


def _stored(values: np.ndarray, dtype: str) -> bytes:
    return (
        bfloat16_bits(values).tobytes() if dtype == "bfloat16" else values.astype("<f4").tobytes()
    )


def config_json(model: ModelSpec) -> dict[str, Any]:
    """Return the config.json that describes `model`, in the layout of transformers 5."""
    config: dict[str, Any] = {
        "architectures": [FAMILIES[model.family].architecture],
        "model_type": FAMILIES[model.family].model_type,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": model.dtype,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    if isinstance(model, MoeModelSpec):
        config |= {
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.experts_per_token,
            "moe_intermediate_size": model.moe.intermediate_size,
            "norm_topk_prob": model.moe.normalize_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if model.family == "llama":
        config |= {"attention_bias": model.qkv_bias, "mlp_bias": False}
    elif model.family in ("qwen3", "qwen3_moe"):
        config |= {"attention_bias": model.qkv_bias, "use_sliding_window": False}
    else:
        config |= {"use_sliding_window": False}
    return config


def _tokenizer_json() -> dict[str, Any]:
    special = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    # Byte-level BPE writes bytes that do not print as other characters: here these two.
    symbols = [
        {"\n": "\u010a", " ": "\u0120"}.get(character, character) for character in CHARACTERS
    ]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *symbols))}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _tokenizer_config(model: ModelSpec) -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer"
        if model.family in ("qwen2", "qwen3", "qwen3_moe")
        else "PreTrainedTokenizerFast",
        "model_max_length": model.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=True) + "\n", encoding="ascii")
