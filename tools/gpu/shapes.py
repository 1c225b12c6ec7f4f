"""Model shapes to measure at, with random weights, beside those of the shipped recipes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engines.checkpoint.tiny_model import config_json, write_tiny_model
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

QWEN3_4B = ModelSpec(
    family="qwen3",
    path="generated:qwen3_4b",
    num_layers=36,
    hidden_size=2560,
    intermediate_size=9728,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    dtype="bfloat16",
)
"""Qwen3-4B, as its published config.json has it."""

SHAPES = {"qwen3_4b": QWEN3_4B}


def recipe_of_shape(name: str) -> RunSpec:
    """Return a shipped recipe, or the 0.5B recipe with another model, by name."""
    if name not in SHAPES:
        return load_recipe(name)
    return load_recipe("gsm8k_qwen2_5_0_5b").model_copy(update={"model": SHAPES[name]})


def write_random_model(folder: str, spec_json: str, *, device: str = "cpu") -> None:
    """Write a folder of the spec's shape: random weights, and the character tokenizer.

    `device` draws the weights: a GPU is much faster where there are billions, and has other bits.
    """
    model = RunSpec.model_validate_json(spec_json).model
    small = model.model_copy(update={"num_layers": 1, "vocab_size": 100, "intermediate_size": 64})
    write_tiny_model(folder, small)
    Path(folder, "config.json").write_text(json.dumps(config_json(model)))
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in parameter_shapes(model).items():
        noise = torch.randn(*shape, generator=generator, device=device)
        values = 1 + 0.05 * noise if "norm" in name else 0.02 * noise
        tensors[name] = values.bfloat16().cpu()
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
