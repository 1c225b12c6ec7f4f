"""GLM-MoE-DSA converted to Megatron and back: bitwise, and the same model on both sides.

Megatron asks for CUDA in places where this family's modules are built and run; what stands in for
it here is put in by the test alone, and only where there is none; elsewhere both models lie there.
Everywhere two modules are plain ones of float32: Megatron's Hadamard rotation takes bfloat16 alone
and needs a package that is no dependency here, its duplicated linear is Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import megatron.core.transformer.experimental_attention_variant.dsa as dsa
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.multi_latent_attention as latent_attention
import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import MLATransformerConfig, ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig

from engines.checkpoint.export import unstacked_experts
from engines.provenance.tensor_digest import digest_tensors
from engines.train.megatron.glm_names import GlmSizes, glm_blocks, glm_to_hf, hf_to_glm
from model_specs.errors import EngineError
from tests.engines.trainer_cases import megatron_groups

CONFIG = GlmMoeDsaConfig(
    vocab_size=250,
    hidden_size=60,
    intermediate_size=136,
    moe_intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    routed_scaling_factor=1.8,
    q_lora_rank=36,
    kv_lora_rank=28,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=20,
    index_topk=8,
    index_head_dim=16,
    index_n_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    mlp_layer_types=["dense", "sparse", "sparse"],
    indexer_types=["full"] * 3,
    pad_token_id=0,
)
"""No matrix is square; one dense layer and two of experts."""
SIZES = GlmSizes(
    intermediate_size=136,
    expert_size=40,
    shared_size=40,
    index_heads=2,
    index_head_dim=16,
    rope_dim=8,
)


class CudaOnCpu(TorchFunctionMode):
    """Tensors that are asked for on `cuda` are made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cuda_or_stand_in() -> AbstractContextManager[Any]:
    return nullcontext() if torch.cuda.is_available() else CudaOnCpu()


def plain_rotation(x: torch.Tensor) -> torch.Tensor:
    """Megatron's Hadamard rotation, of rows whose length is a power of two, in any dtype."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix.to(x) * x.shape[-1] ** -0.5


class PlainLinear(torch.nn.Module):
    """A matrix that every rank holds, as Transformer Engine's duplicated linear is."""

    def __init__(self, rows_in: int, rows_out: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows_out, rows_in, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            patch.setattr(latent_attention, "HAVE_TE", False)
            patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        patch.setattr(dsa, "rotate_activation", plain_rotation)
        with megatron_groups(tmp_path_factory.mktemp("join")):
            initialize_rng_tracker(inference_rng_tracker=True)
            yield


def megatron_model() -> GPTModel:
    options: dict[str, Any] = dict(
        num_layers=3,
        hidden_size=60,
        num_attention_heads=4,
        ffn_hidden_size=136,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        deterministic_mode=True,
        multi_latent_attention=True,
        q_lora_rank=36,
        kv_lora_rank=28,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=20,
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=CONFIG.rope_parameters["rope_theta"],
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=40,
        moe_shared_expert_intermediate_size=40,
        moe_layer_freq=[0, 1, 1],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_load_balancing_type="none",
        moe_router_topk_scaling_factor=1.8,
        moe_token_dispatcher_type="allgather",
        moe_router_dtype="fp32",
        moe_router_num_groups=1,
        moe_router_group_topk=1,
    )
    # Megatron-core 0.19 makes no such specification of a model that names its attention.
    spec = get_gpt_decoder_block_spec(
        MLATransformerConfig(**options), use_transformer_engine=False, normalization="RMSNorm"
    )
    # The only rotation of the indexer that 0.16 has.
    if "dsa_indexer_rope_interleaved" in MLATransformerConfig.__dataclass_fields__:
        options["dsa_indexer_rope_interleaved"] = True
    config = MLATransformerConfig(
        **options,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=16,
        dsa_indexer_topk=8,
        dsa_indexer_loss_coeff=0.0,
    )
    parts = dsa.DSAIndexerSubmodules(
        linear_wq_b=PlainLinear,
        linear_wk=PlainLinear,
        k_norm=WrappedTorchNorm,
        linear_weights_proj=PlainLinear,
    )
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=parts)
    core = ModuleSpec(module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer))
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = core
    with cuda_or_stand_in():
        model = GPTModel(
            config,
            spec,
            vocab_size=250,
            max_sequence_length=128,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
    return model.to(DEVICE).eval()


@pytest.fixture(scope="module")
def models() -> SimpleNamespace:
    """Stock transformers with random values everywhere, and Megatron's model."""
    torch.manual_seed(3)
    stock = AutoModelForCausalLM.from_config(
        CONFIG, attn_implementation="eager", dtype=torch.float32
    )
    stock = stock.to(DEVICE).eval()
    state = dict(unstacked_experts(stock.state_dict()))
    with torch.no_grad():
        for name, tensor in state.items():
            spread = 0.1 if "norm" in name or name.endswith("bias") else 0.3
            tensor.copy_(torch.randn_like(tensor) * spread + ("norm.weight" in name))
    own = megatron_model()
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in own.state_dict().items()
        if tensor is not None and "_extra_state" not in name
    }
    return SimpleNamespace(stock=stock, state=state, own=own, shapes=shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conversion_there_and_back_is_bitwise_the_identity(
    models: SimpleNamespace, dtype: torch.dtype
) -> None:
    state = {
        name: t if name.endswith("e_score_correction_bias") else t.to(dtype)
        for name, t in models.state.items()
    }
    fused = hf_to_glm(state, SIZES, models.shapes)
    back = glm_to_hf(fused, SIZES)
    assert digest_tensors(back) == digest_tensors({name: state[name] for name in back})
    assert back.keys() == state.keys()
    other = {name: torch.randn_like(tensor) for name, tensor in fused.items()}
    again = hf_to_glm(glm_to_hf(other, SIZES), SIZES, models.shapes)
    assert all(torch.equal(again[name], other[name]) for name in other)


@pytest.mark.parametrize("topk", [8, 64])
def test_the_converted_model_has_the_logits_of_stock_transformers(
    models: SimpleNamespace, topk: int
) -> None:
    """With fewer keys than the indexer chooses from, its scores decide; with more, nothing does."""
    for layer in models.stock.model.layers:
        layer.self_attn.indexer.index_topk = topk
    for layer in models.own.decoder.layers:
        core = layer.self_attention.core_attention
        core.index_topk = core.indexer.index_topk = topk  # 0.16 asks the one, 0.19 the other
    converted = hf_to_glm(models.state, SIZES, models.shapes)
    ids = torch.randint(1, 250, (2, 40), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def difference(state: dict[str, torch.Tensor]) -> float:
        models.own.load_state_dict(state, strict=False)
        positions = torch.arange(40, device=DEVICE)[None].expand(2, -1)
        with torch.no_grad(), cuda_or_stand_in():
            found = models.own(ids, positions, None)
            wanted = models.stock(ids).logits
        return float((found - wanted).abs().max() / wanted.abs().max())

    assert difference(converted) < 1e-5
    # The control: moved indexer rows rotate other channels; it shows where the indexer decides.
    name = "decoder.layers.0.self_attention.core_attention.indexer.linear_wq_b.weight"
    moved = converted[name].roll(SIZES.rope_dim, dims=0)
    if topk == 8:
        assert difference({**converted, name: moved}) > 1e-3


def test_rotary_frequencies_of_every_layer_have_the_bytes_of_stock_transformers(
    models: SimpleNamespace,
) -> None:
    stock = models.stock.model.rotary_emb.inv_freq.cpu()
    assert stock.shape == (SIZES.rope_dim // 2,)
    found = [
        layer.self_attention.rotary_pos_emb.inv_freq.cpu() for layer in models.own.decoder.layers
    ]
    assert len(found) == 3
    for frequencies in found:
        assert frequencies.dtype == stock.dtype == torch.float32
        assert torch.equal(frequencies.view(torch.int32), stock.view(torch.int32))


def test_without_cuda_alone_something_stands_in_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, kind in ((False, CudaOnCpu), (True, nullcontext)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert type(cuda_or_stand_in()) is kind


def test_names_without_a_place_are_refused(models: SimpleNamespace) -> None:
    with pytest.raises(EngineError, match="mtp"):
        list(glm_blocks("mtp.layers.0.eh_proj.weight", torch.zeros(2, 2), SIZES))
    name = "decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight"
    with pytest.raises(EngineError, match="has 3 rows, but 1 indexer heads of 16"):
        list(glm_blocks(name, torch.zeros(3, 60), SIZES))
    without = {n: t for n, t in models.state.items() if "layers.2.mlp.gate.weight" not in n}
    with pytest.raises(EngineError, match=r"layers\.2\.mlp\.gate\.weight"):
        hf_to_glm(without, SIZES, models.shapes)
    extra = {**models.state, "model.layers.3.eh_proj.weight": torch.zeros(1)}
    with pytest.raises(EngineError, match=r"model\.layers\.3\.eh_proj\.weight"):
        hf_to_glm(extra, SIZES, models.shapes)
