"""Logical names: fused storage is covered once, in place, and a push must be complete."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from engines.weights.names import (
    EMBEDDING,
    HEAD,
    ModelFacts,
    check_complete,
    expected_shapes,
    facts_of,
    logical_views,
    tied_aliases,
)
from model_specs.errors import EngineError, UnsupportedError

QWEN = Qwen2Config(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
LLAMA = LlamaConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    attention_bias=True,
    tie_word_embeddings=False,
)


def _fused(config: Qwen2Config | LlamaConfig) -> dict[str, torch.Tensor]:
    """Parameters as vLLM keeps them: fused matrices, the vocabulary padded to 128."""
    facts = facts_of(config)
    shapes = expected_shapes(facts)
    rows = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    parameters: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name in (EMBEDDING, HEAD):
            parameters[name] = torch.randn(128, *shape[1:])
            continue
        for fused, parts in rows.items():
            if f".{parts[0]}." in name:
                total = sum(shapes[name.replace(parts[0], part)][0] for part in parts)
                parameters[name.replace(parts[0], fused)] = torch.randn(total, *shape[1:])
            if any(f".{part}." in name for part in parts):
                break
        else:
            parameters[name] = torch.randn(*shape)
    return parameters


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen2", "llama"])
def test_the_views_are_exactly_the_tensors_of_a_full_push(
    config: Qwen2Config | LlamaConfig,
) -> None:
    parameters = _fused(config)
    views = list(logical_views(parameters.items(), facts_of(config)))
    shapes = {name: tuple(view.shape) for name, view in views}
    assert shapes == expected_shapes(facts_of(config))
    assert len(views) == len(shapes)


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen2", "llama"])
def test_expected_names_and_shapes_are_those_of_transformers(
    config: Qwen2Config | LlamaConfig,
) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes == expected_shapes(facts_of(config))


def test_q_k_and_v_are_the_rows_of_the_fused_matrix_in_that_order() -> None:
    parameters = _fused(QWEN)
    views = dict(logical_views(parameters.items(), facts_of(QWEN)))
    fused = parameters["model.layers.1.self_attn.qkv_proj.weight"]
    parts = [views[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(torch.cat(parts), fused)
    assert [len(part) for part in parts] == [8, 4, 4]


def test_writing_to_a_view_writes_to_the_storage() -> None:
    parameters = _fused(QWEN)
    views = dict(logical_views(parameters.items(), facts_of(QWEN)))
    views["model.layers.0.mlp.up_proj.weight"].fill_(7.0)
    fused = parameters["model.layers.0.mlp.gate_up_proj.weight"]
    assert bool((fused[12:] == 7.0).all())
    assert not bool((fused[:12] == 7.0).any())


def test_vocabulary_padding_is_not_counted() -> None:
    views = dict(logical_views(_fused(QWEN).items(), facts_of(QWEN)))
    assert tuple(views[EMBEDDING].shape) == (100, 8)


def test_a_tied_head_is_an_alias_and_not_a_tensor() -> None:
    facts = facts_of(QWEN)
    parameters = _fused(QWEN)
    names = [
        name for name, _ in logical_views([*parameters.items(), (HEAD, torch.ones(128, 8))], facts)
    ]
    assert HEAD not in names
    assert tied_aliases(facts) == {HEAD: EMBEDDING}
    assert tied_aliases(facts_of(LLAMA)) == {}


def test_a_packed_matrix_is_refused_by_name() -> None:
    parameters = _fused(QWEN)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    parameters[name] = torch.empty(0, 8)
    with pytest.raises(EngineError, match=rf"{name} has 0 rows but the config asks for 16"):
        dict(logical_views(parameters.items(), facts_of(QWEN)))


def test_an_unknown_model_type_lists_the_known_ones() -> None:
    from transformers import GPT2Config

    with pytest.raises(UnsupportedError, match=r"'gpt2'.*llama, qwen2"):
        facts_of(GPT2Config())


def test_an_incomplete_push_names_every_fault() -> None:
    expected = {"a": (2,), "b": (3,), "c": (4,)}
    check_complete(expected.items(), expected)
    with pytest.raises(EngineError) as caught:
        check_complete([("a", (2,)), ("a", (2,)), ("b", (5,)), ("d", (1,))], expected)
    message = str(caught.value)
    assert "missing: c" in message
    assert "unknown: d" in message
    assert "there twice: a" in message
    assert "b (5,) instead of (3,)" in message


def moe_facts() -> ModelFacts:
    return ModelFacts(
        num_layers=1,
        hidden_size=8,
        intermediate_size=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=10,
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        num_experts=3,
        expert_size=6,
    )


def test_stacked_experts_are_views_under_the_names_of_each() -> None:
    prefix = "model.layers.0.mlp.experts"
    w13, w2 = torch.randn(3, 12, 8), torch.randn(3, 8, 6)
    stacked = [(f"{prefix}.routed_experts.w13_weight", w13), (f"{prefix}.w2_weight", w2)]
    views = dict(logical_views(stacked, moe_facts()))
    wanted = {n: s for n, s in expected_shapes(moe_facts()).items() if ".experts." in n}
    assert {name: tuple(view.shape) for name, view in views.items()} == wanted
    views[f"{prefix}.2.up_proj.weight"].fill_(7.0)
    assert bool((w13[2, 6:] == 7).all())
    assert not bool((w13[2, :6] == 7).any())
    assert torch.equal(views[f"{prefix}.1.down_proj.weight"], w2[1])
    assert sum(view.numel() for view in views.values()) == w13.numel() + w2.numel()


def test_packed_or_padded_experts_are_refused() -> None:
    padded = [("model.layers.0.mlp.experts.w13_weight", torch.zeros(3, 32, 8))]
    with pytest.raises(EngineError, match=r"\(3, 32, 8\) but the config asks for \(3, 12, 8\)"):
        list(logical_views(padded, moe_facts()))
