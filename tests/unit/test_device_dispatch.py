"""Which definition of an op runs, and how an engine is started, on either device; needs no GPU."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pytest
import torch

from engines import numerics
from engines.numerics import dispatch
from engines.rollout.group import engine_env
from engines.rollout.plugin import check_version
from engines.rollout.plugin_cuda import without_graphs
from engines.rollout.vllm_options import engine_options, start_options
from engines.train.group import trainer_env
from model_specs.errors import UnsupportedError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe


class OnDevice(torch.Tensor):
    """A host tensor that says it lies on CUDA."""

    is_cuda = True  # type: ignore[assignment]


def spec(device: str):
    return apply_overrides(load_recipe("tiny_cpu"), (f"execution.device={device}",))


def test_the_device_of_the_first_tensor_decides_which_op_runs(monkeypatch):
    calls = []
    fake = types.ModuleType("fake_cuda_ops")
    fake.double = lambda x, *, by=2: calls.append("cuda") or x  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_cuda_ops", fake)
    monkeypatch.setattr(dispatch, "CUDA_OPS", "fake_cuda_ops")

    def double(x, *, by=2):
        calls.append("cpu")
        return x

    op = dispatch.by_device(double)
    host, device = torch.ones(2), torch.ones(2).as_subclass(OnDevice)
    for value in (host, device, [host], (device,)):
        op(value, by=3)
    assert calls == ["cpu", "cuda", "cpu", "cuda"]


def test_an_op_without_a_definition_on_cuda_is_refused_there_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "fake_cuda_ops", types.ModuleType("fake_cuda_ops"))
    monkeypatch.setattr(dispatch, "CUDA_OPS", "fake_cuda_ops")

    def treble(x):
        return x

    op = dispatch.by_device(treble)
    assert op(torch.ones(1)).item() == 1.0
    with pytest.raises(UnsupportedError, match="treble has no definition on CUDA"):
        op(torch.ones(1).as_subclass(OnDevice))


def test_every_op_is_dispatched_by_device_but_those_that_are_exact_anywhere():
    # Read, not imported: the CPU environment has no Triton.
    source = Path(numerics.__file__).parent / "cuda" / "__init__.py"
    names = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    wrapped = {name for name in numerics.__all__ if hasattr(getattr(numerics, name), "__wrapped__")}
    assert wrapped >= set(names) & set(numerics.__all__)
    generic = {
        "ROW_BLOCK",
        "ROW_TILE",
        "Forbidden",
        "SlotSums",
        "forbid_",
        "ordered_sum",
        "rotary_inv_freq",
        "token_sum",
        "tree_sum",
    }
    assert wrapped == set(numerics.__all__) - generic


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_is_asked_for_dummy_weights_and_for_a_prefix_cache(device):
    """Asked, since vLLM may do the same of itself today."""
    for policy, loads in (("aligned", "dummy"), ("stock", "dummy"), ("native", "auto")):
        options = engine_options(spec(device), policy=policy, dtype="bfloat16")
        assert options["load_format"] == loads
        assert options["enable_prefix_caching"] is True
        assert options["generation_config"] == "vllm"
        assert options["logprobs_mode"] == "processed_logprobs"
        assert options["dtype"] == "bfloat16"
        assert options["seed"] == 0


def test_an_aligned_engine_on_cuda_captures_decode_and_compiles_nothing():
    options = start_options(spec("cuda"), policy="aligned", max_model_len=120)
    assert options["compilation_config"]["mode"] == 0
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert options["attention_config"] == {"backend": "TRITON_ATTN"}
    native = start_options(spec("cuda"), policy="native", max_model_len=120)
    assert native["enforce_eager"] is True
    assert "attention_config" not in native


def test_the_peers_switches_are_flashinfer_and_their_own_variables():
    asked = (
        "numerics.policy=peer", "plan.gates.logprobs=report", "plan.gates.preflight=optional",
        "plan.gates.controls=off", "plan.gates.layerwise=off", "execution.device=cuda",
    )  # fmt: skip
    peer = apply_overrides(load_recipe("tiny_cpu"), asked)
    options = start_options(peer, policy="peer", max_model_len=120)
    assert options["attention_config"] == {"backend": "FLASHINFER"}
    assert "attention_config" not in start_options(peer, policy="stock", max_model_len=120)
    for found in (engine_env(peer, "peer"), trainer_env(peer)):
        assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert found["NCCL_ALGO"] == "Ring"
        assert found["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        assert "CUBLASLT_WORKSPACE_SIZE" not in found
        assert "VLLM_BATCH_INVARIANT" not in found


def test_flashinfer_replaces_the_shared_attention_and_nothing_else():
    asked = apply_overrides(
        load_recipe("tiny_cpu"), ("numerics.rollout_attention=flashinfer", "execution.device=cuda")
    )
    ours = start_options(spec("cuda"), policy="aligned", max_model_len=120)
    theirs = start_options(asked, policy="aligned", max_model_len=120)
    assert theirs.pop("attention_config") == {"backend": "FLASHINFER"}
    assert ours.pop("attention_config") == {"backend": "TRITON_ATTN"}
    assert ours == theirs


def test_an_engine_on_the_cpu_never_splits_a_prompt_and_gets_nothing_of_cuda():
    options = start_options(spec("cpu"), policy="aligned", max_model_len=4000)
    assert options["enable_chunked_prefill"] is False
    assert options["max_num_batched_tokens"] == 4000
    assert "attention_config" not in options


def test_variables_of_cuda_are_set_for_cuda_alone():
    added = engine_env(spec("cuda")).keys() - engine_env(spec("cpu")).keys()
    assert added == {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "NCCL_ALGO",
        "NCCL_NVLS_ENABLE",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_USE_V2_MODEL_RUNNER",
    }


def test_graphs_are_left_out_while_a_block_lasts_and_are_back_after_an_error():
    captured = {(1, 0): ["a graph"]}
    manager = types.SimpleNamespace(_candidates=captured)
    runner = types.SimpleNamespace(cudagraph_manager=manager)
    worker = types.SimpleNamespace(model_runner=runner)
    llm = types.SimpleNamespace(collective_rpc=lambda function: [function(worker)])

    def fails() -> None:
        with without_graphs(llm):
            assert manager._candidates == {}
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert manager._candidates is captured
    runner.cudagraph_manager = types.SimpleNamespace()
    with pytest.raises(UnsupportedError, match="_candidates"):
        fails()


def test_a_version_of_vllm_is_tested_on_one_device_and_not_on_the_other():
    check_version("0.26.0", device="cuda")
    check_version("0.32.0+cpu", device="cpu")
    for version, device in (("0.32.0", "cuda"), ("0.26.0", "cpu"), ("0.26.0", "xpu")):
        with pytest.raises(UnsupportedError, match=version):
            check_version(version, device=device)
