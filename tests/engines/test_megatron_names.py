"""Megatron's fused rows under the checkpoint's names: bitwise there and back, nothing lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.checkpoint.export import unstacked_experts
from engines.numerics import rotary_inv_freq
from engines.provenance.tensor_digest import digest_tensor, digest_tensors
from engines.train.fsdp2.model import model_config
from engines.train.fsdp2.stock import _rotary_class
from engines.train.megatron import model as megatron_model
from engines.train.megatron.model import build_model, check_frequencies, transformer_config
from engines.train.megatron.names import (
    all_blocks,
    hf_to_megatron,
    logical_blocks,
    megatron_to_hf,
)
from model_specs.errors import EngineError, SpecError
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec, MoeModelSpec, MoeSpec
from tests.engines.trainer_cases import megatron_groups

QWEN2 = ModelSpec(
    family="qwen2",
    path="generated:tiny",
    num_layers=3,
    hidden_size=60,
    intermediate_size=88,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    vocab_size=101,
    max_position_embeddings=64,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    dtype="bfloat16",
)
"""In no spec here is a matrix square, so that a transposed one cannot be taken for another."""
LLAMA = QWEN2.model_copy(
    update={
        "family": "llama",
        "qkv_bias": False,
        "tie_word_embeddings": False,
        "head_dim": 14,
        "rope_theta": 1e4,
    }
)
QWEN3 = QWEN2.model_copy(
    update={"family": "qwen3", "qkv_bias": False, "qk_norm": True, "head_dim": 16}
)
QWEN3_MOE = MoeModelSpec(
    **{**QWEN3.model_dump(), "family": "qwen3_moe"},
    moe=MoeSpec(num_experts=5, experts_per_token=2, intermediate_size=22, normalize_weights=True),
)
DENSE = (QWEN2, LLAMA, QWEN3)
SPECS = (*DENSE, QWEN3_MOE)


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's groups, as a trainer of one rank has them."""
    with megatron_groups(tmp_path_factory.mktemp("join")):
        yield


def random_state(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values at random everywhere, biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in parameter_shapes(spec).items()
    }


def megatron_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    model = build_model(spec, compute_dtype=torch.float32, temperature=1.0)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_no_matrix_is_square_in_either_layout(spec: ModelSpec) -> None:
    for shapes in (parameter_shapes(spec), megatron_shapes(spec)):
        assert not [n for n, shape in shapes.items() if len(shape) > 1 and len(set(shape)) == 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_conversion_there_and_back_is_bitwise_the_identity(
    spec: ModelSpec, dtype: torch.dtype
) -> None:
    state, shapes = random_state(spec, dtype), megatron_shapes(spec)
    fused = hf_to_megatron(state, spec, shapes)
    back = megatron_to_hf(fused, spec)
    assert list(back) == list(state)
    assert digest_tensors(back) == digest_tensors(state)
    other = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    there = hf_to_megatron(megatron_to_hf(other, spec), spec, shapes)
    assert all(torch.equal(there[name], other[name]) for name in other)
    counts = [sum(math.prod(shape) for shape in s.values()) for s in (shapes, dict_shapes(state))]
    assert counts[0] == counts[1]


def dict_shapes(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("spec", DENSE, ids=lambda spec: spec.family)
def test_fused_rows_are_where_stock_transformers_and_megatron_say(spec: ModelSpec) -> None:
    """The layout itself, against transformers: a wrong interleaving would survive a round trip."""
    state = random_state(spec, torch.float32)
    hf = AutoModelForCausalLM.from_config(model_config(spec), dtype=torch.float32)
    _, unexpected = hf.load_state_dict(state, strict=False)
    assert not unexpected
    fused = hf_to_megatron(state, spec, megatron_shapes(spec))
    attention = hf.model.layers[1].self_attn
    hidden = torch.randn(5, spec.hidden_size)
    bias = fused.get("decoder.layers.1.self_attention.linear_qkv.bias")
    weight = fused["decoder.layers.1.self_attention.linear_qkv.weight"]
    mixed = torch.nn.functional.linear(hidden, weight, bias)
    groups, width = spec.num_key_value_heads, spec.head_dim
    queries = spec.num_attention_heads // groups * width
    q, k, v = mixed.view(5, groups, -1).split([queries, width, width], dim=2)
    for ours, projection in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj")):
        torch.testing.assert_close(ours.reshape(5, -1), getattr(attention, projection)(hidden))
    output = fused["decoder.layers.1.self_attention.linear_proj.weight"]
    assert output.shape == (spec.hidden_size, spec.num_attention_heads * width)
    heads = torch.randn(5, spec.num_attention_heads * width)
    torch.testing.assert_close(heads @ output.T, attention.o_proj(heads))
    gate, up = (hidden @ fused["decoder.layers.1.mlp.linear_fc1.weight"].T).chunk(2, dim=1)
    torch.testing.assert_close(gate, hf.model.layers[1].mlp.gate_proj(hidden))
    torch.testing.assert_close(up, hf.model.layers[1].mlp.up_proj(hidden))


def test_experts_are_where_stock_transformers_and_megatron_say() -> None:
    spec, state = QWEN3_MOE, random_state(QWEN3_MOE, torch.float32)
    hf = AutoModelForCausalLM.from_config(model_config(spec), dtype=torch.float32)
    with torch.no_grad():
        for name, view in unstacked_experts(hf.state_dict()):
            if name in state:
                view.copy_(state[name])
    fused = hf_to_megatron(state, spec, megatron_shapes(spec))
    block = hf.model.layers[2].mlp
    assert torch.equal(fused["decoder.layers.2.mlp.router.weight"], block.gate.weight)
    prefix = "decoder.layers.2.mlp.experts.local_experts.3."
    assert torch.equal(fused[f"{prefix}linear_fc1.weight"], block.experts.gate_up_proj[3])
    assert torch.equal(fused[f"{prefix}linear_fc2.weight"], block.experts.down_proj[3])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_blocks_are_views_that_cover_all_storage_once(spec: ModelSpec) -> None:
    fused = {name: torch.zeros(shape) for name, shape in megatron_shapes(spec).items()}
    for block in all_blocks(fused.items(), spec):
        block.rows.add_(1)
    assert all(bool((tensor == 1).all()) for tensor in fused.values())


def test_swapping_two_groups_of_the_fused_rows_changes_a_logical_digest() -> None:
    """The control of the digests: they see where a row stands."""
    state, shapes = random_state(QWEN2, torch.float32), megatron_shapes(QWEN2)
    fused = hf_to_megatron(state, QWEN2, shapes)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    fused[name] = fused[name].view(2, -1, 60).flip(0).reshape(-1, 60)
    back = megatron_to_hf(fused, QWEN2)
    changed = {n for n in back if digest_tensor(n, back[n]) != digest_tensor(n, state[n])}
    prefix = "model.layers.0.self_attn."
    assert changed == {f"{prefix}{part}_proj.weight" for part in "qkv"}


def test_a_missing_padded_or_unknown_tensor_is_refused_by_name() -> None:
    fused = {name: torch.zeros(shape) for name, shape in megatron_shapes(LLAMA).items()}
    without = {name: t for name, t in fused.items() if name != "output_layer.weight"}
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
        megatron_to_hf(without, LLAMA)
    padded = fused | {"embedding.word_embeddings.weight": torch.zeros(128, 60)}
    with pytest.raises(EngineError, match=r"embed_tokens\.weight is \(128, 60\), .* \(101, 60\)"):
        megatron_to_hf(padded, LLAMA)
    with pytest.raises(EngineError, match="mtp"):
        megatron_to_hf(fused | {"mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)}, LLAMA)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(EngineError, match="has 1 rows, but the spec implies 140"):
        list(logical_blocks(name, torch.zeros(1, 60), LLAMA))


def test_rotary_frequencies_are_compared_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in SPECS:
        check_frequencies(spec)
        shared = rotary_inv_freq(spec.rope_theta, spec.head_dim)
        assert torch.equal(shared.view(torch.int32), stock_frequencies(spec).view(torch.int32))

    def nudged(theta: float, head_dim: int) -> torch.Tensor:
        frequencies = rotary_inv_freq(theta, head_dim)
        frequencies[2] = torch.nextafter(frequencies[2], torch.tensor(2.0))
        return frequencies

    monkeypatch.setattr(megatron_model.numerics, "rotary_inv_freq", nudged)
    with pytest.raises(EngineError, match="frequency 2 is"):
        check_frequencies(QWEN2)


def stock_frequencies(spec: ModelSpec) -> torch.Tensor:
    """What transformers' own rotary module of the family rotates by."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(spec))
    frequencies: torch.Tensor = _rotary_class(model.model)(config=model.config).inv_freq
    return frequencies


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_a_rope_scaling_is_refused_by_both_trainers_never_dropped(spec: ModelSpec) -> None:
    scaled = spec.model_copy(update={"rope_scaling": '{"rope_type":"yarn","factor":4.0}'})
    with pytest.raises(SpecError, match=r"rope_scaling=.*yarn"):
        model_config(scaled)
    with pytest.raises(SpecError, match=r"rope_scaling=.*yarn"):
        transformer_config(scaled, compute_dtype=torch.float32)


def test_megatron_knows_no_other_names_than_these(tmp_path: Path) -> None:
    """Tied or not, with bias or norm or neither: every parameter has a logical name."""
    for spec in SPECS:
        names = {b.name for b in all_blocks(zero_parameters(spec), spec)}
        assert names == set(parameter_shapes(spec))
        assert ("lm_head.weight" in names) == (not spec.tie_word_embeddings)


def zero_parameters(spec: ModelSpec) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros(shape)) for name, shape in megatron_shapes(spec).items()]
