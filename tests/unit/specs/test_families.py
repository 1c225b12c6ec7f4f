"""A config.json is the model of the spec, or one error names every field that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.tiny_model import config_json
from model_specs.errors import SpecError
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec
from model_specs.overrides import apply_overrides
from model_specs.registry import (
    RECIPES,
    check_config,
    family_of,
    load_recipe,
    spec_from_config,
)

QWEN2 = load_recipe("tiny_cpu").model
LLAMA = load_recipe("gsm8k_smollm2_135m").model

SMOLLM2_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
"""The layout in which configs were written before transformers 5."""


@pytest.mark.parametrize("model", [QWEN2, LLAMA], ids=["qwen2", "llama"])
def test_a_matching_config_passes_and_gives_the_spec_back(model: ModelSpec) -> None:
    config = json.loads(json.dumps(config_json(model)))
    check_config(model, config)
    assert spec_from_config(config, model.path) == model


def test_the_old_layout_of_a_config_is_read_too() -> None:
    check_config(LLAMA, SMOLLM2_CONFIG)
    assert spec_from_config(SMOLLM2_CONFIG, LLAMA.path) == LLAMA


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("hidden_size", 80, "hidden_size: spec 128, config.json 80"),
        ("num_hidden_layers", 3, "num_layers: spec 2, config.json 3"),
        ("num_attention_heads", 8, "num_attention_heads: spec 4, config.json 8"),
        ("num_key_value_heads", 4, "num_key_value_heads: spec 2, config.json 4"),
        ("head_dim", 16, "head_dim: spec 32, config.json 16"),
        ("intermediate_size", 192, "intermediate_size: spec 176, config.json 192"),
        ("vocab_size", 101, "vocab_size: spec 100, config.json 101"),
        ("max_position_embeddings", 512, "max_position_embeddings: spec 256, config.json 512"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps: spec 1e-06, config.json 1e-05"),
        ("tie_word_embeddings", False, "tie_word_embeddings: spec True, config.json False"),
        ("dtype", "float32", "dtype: spec 'bfloat16', config.json 'float32'"),
        ("hidden_act", "gelu", "hidden_act: spec 'silu', config.json 'gelu'"),
        ("use_sliding_window", True, "use_sliding_window: spec False, config.json True"),
        (
            "rope_parameters",
            {"rope_theta": 5e5, "rope_type": "default"},
            "rope_theta: spec 10000.0, config.json 500000.0",
        ),
        (
            "rope_parameters",
            {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0},
            'rope_scaling: spec None, config.json \'{"factor":4.0,"rope_type":"yarn"}\'',
        ),
        ("num_key_value_heads", None, "num_key_value_heads: spec 2, config.json None"),
    ],
)
def test_a_wrong_fact_is_refused_with_field_and_both_values(
    name: str, value: object, field: str
) -> None:
    config = config_json(QWEN2) | {name: value}
    with pytest.raises(SpecError) as caught:
        check_config(QWEN2, config)
    assert field in str(caught.value)


def test_a_wrong_bias_flag_is_refused_in_both_families() -> None:
    with pytest.raises(SpecError, match=r"qkv_bias: spec False, config\.json True"):
        check_config(QWEN2.model_copy(update={"qkv_bias": False}), config_json(QWEN2))
    with pytest.raises(SpecError, match=r"qkv_bias: spec False, config\.json True"):
        check_config(LLAMA, SMOLLM2_CONFIG | {"attention_bias": True})


def test_all_differences_come_in_one_error() -> None:
    config = config_json(QWEN2) | {"hidden_size": 80, "vocab_size": 101, "hidden_act": "gelu"}
    with pytest.raises(SpecError) as caught:
        check_config(QWEN2, config)
    for field in ("3 differing", "hidden_size", "vocab_size", "hidden_act"):
        assert field in str(caught.value)


def test_another_family_is_refused() -> None:
    with pytest.raises(SpecError, match="model_type is 'llama' but the spec's family is 'qwen2'"):
        check_config(QWEN2, SMOLLM2_CONFIG)


@pytest.mark.parametrize("model_type", ["mamba", None])
def test_an_unknown_model_type_lists_the_known_ones(model_type: str | None) -> None:
    with pytest.raises(SpecError, match=f"{model_type!r} is not supported; known types: llama, q"):
        family_of({"model_type": model_type})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMOLLM2_CONFIG | {"attention_bias": True}, "attention_bias: needs False"),
        (SMOLLM2_CONFIG | {"mlp_bias": True}, "mlp_bias: needs False"),
        (SMOLLM2_CONFIG | {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: needs"),
        (SMOLLM2_CONFIG | {"rope_parameters": {"rope_theta": 5.0}}, "beside rope_parameters"),
        ({"model_type": "llama"}, "num_layers=None"),
        (config_json(QWEN2) | {"layer_types": ["sliding_attention"]}, "layer_types: needs"),
        (config_json(QWEN2) | {"dtype": "float16"}, "dtype='float16'"),
    ],
)
def test_what_the_shared_ops_lack_gives_no_spec(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_from_config(config, "folder")


NOT_READ = {
    "quantization_config": ({"quant_method": "fp8", "skip": ["x"]}, "quantised .*None, .* 'fp8'$"),
    "compression_config": ({"format": "pack"}, r"quantised .*None, .* \['format'\]$"),
    "vision_config": ({"model_type": "siglip", "depth": 3}, "multimodal.*None, .* 'siglip'$"),
    "audio_config": ({"depth": 3}, r"multimodal.*None, .* \['depth'\]$"),
    "num_nextn_predict_layers": (1, "multi-token prediction.*needs 0, config.json 1$"),
    "mtp_num_hidden_layers": (2, "multi-token prediction.*needs 0, config.json 2$"),
    "num_mtp_layers": (1, "multi-token prediction.*needs 0, config.json 1$"),
    "num_mtp_modules": (3, "multi-token prediction.*needs 0, config.json 3$"),
}


@pytest.mark.parametrize("name", NOT_READ)
@pytest.mark.parametrize("config", [config_json(QWEN2), SMOLLM2_CONFIG], ids=["qwen2", "llama"])
def test_what_is_beside_a_plain_decoder_is_refused_by_name(
    config: dict[str, Any], name: str, tmp_path: Path
) -> None:
    value, message = NOT_READ[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(SpecError, match=rf"config\.json: not supported: {name} \({message}"):
        apply_overrides(load_recipe("tiny_cpu"), (f"model.path={tmp_path}",))
    model = spec_from_config(config, "folder")
    with pytest.raises(SpecError, match=rf"{name} \("):  # where a spec names the model already
        check_config(model, config | {name: value})
    for none in (None, 0, {}):
        assert spec_from_config(config | {name: none}, "folder") == model


def test_shapes_follow_heads_bias_and_tie() -> None:
    shapes = parameter_shapes(QWEN2)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (64, 128)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (64,)
    assert "lm_head.weight" not in shapes
    untied = parameter_shapes(LLAMA.model_copy(update={"tie_word_embeddings": False}))
    assert untied["lm_head.weight"] == (49152, 576)
    assert not [name for name in untied if name.endswith(".bias")]
    assert list(shapes) == sorted(shapes)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"'tiny'; known recipes: .*tiny_cpu"):
        load_recipe("tiny")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_each_recipe_loads_under_its_own_name(name: str) -> None:
    assert load_recipe(name).recipe == name


def test_the_public_reference_settings_are_kept() -> None:
    spec = load_recipe("gsm8k_qwen2_5_0_5b")
    assert (spec.samples_per_step, spec.samples_per_update) == (256, 256)
    assert (spec.optimizer.lr, spec.optimizer.beta2, spec.optimizer.weight_decay) == (
        1e-6,
        0.98,
        0.1,
    )
    assert (spec.loss.clip_low, spec.loss.clip_high, spec.loss.kl_type) == (0.2, 0.28, "k3")
    assert (spec.sampling.max_new_tokens, spec.plan.num_steps, spec.seeds.root) == (1024, 100, 1234)
