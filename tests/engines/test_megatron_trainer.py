"""Megatron against FSDP2 on the same weights and samples: every bit of every probe."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core.transformer.multi_latent_attention as latent_attention
import psutil
import pytest
import torch
from megatron.core.models.gpt import GPTModel, gpt_model

from engines import numerics
from engines.checkpoint.convert import digest_dcp_model
from engines.checkpoint.state_diff import compare_checkpoints
from engines.provenance.tensor_digest import digest_tensor
from engines.provenance.verdict import Verdict
from engines.train.megatron import layers, parallel
from engines.train.trainer import GrpoTrainer
from model_specs.errors import CheckpointError, EngineError
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import RunSpec
from tests.engines.loaded_code import differing, fresh, loaded
from tests.engines.rank_program import ROOT
from tests.engines.trainer_cases import (
    DTYPES,
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    made_samples,
    make_spec,
    started,
    write_model,
)

FAMILIES = (QWEN2, LLAMA, QWEN3, QWEN3_MOE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder with `hf` and `dcp`."""
    return {
        model.family: write_model(tmp_path_factory.mktemp(model.family), model)
        for model in FAMILIES
    }


def on(trainer: str, spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"trainer": trainer})


def three_updates(trainer: GrpoTrainer) -> dict[str, Any]:
    """Everything that two trainers must agree on, over 3 steps."""
    log: dict[str, Any] = {"initial": trainer.weight_digests()}
    for step in (1, 2, 3):
        samples = made_samples(seed=step)
        log[f"{step} scores"] = trainer.score(samples)
        log[f"{step} reference"] = trainer.reference_scores()
        record = trainer.update(samples, step=step, update=0)
        log |= {f"{step} {probe}": dict(names) for probe, names in record.digests.items()}
        log[f"{step} metrics"] = {name: value.hex() for name, value in record.metrics.items()}
        log[f"{step} state"] = trainer.state_digest()
    log["wire"] = {name: digest_tensor(name, tensor) for name, tensor in trainer.wire_tensors()}
    return log


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", FAMILIES, ids=lambda model: model.family)
def test_megatron_gives_every_bit_of_fsdp2_over_three_updates(
    model: ModelSpec, dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    logs = {}
    for name in ("fsdp2", "megatron"):
        spec = on(name, make_spec(dtype, model=model, kl_coef=0.1, entropy_coef=0.01))
        with started(spec, folders[model.family], tmp_path) as trainer:
            logs[name] = three_updates(trainer)
    fsdp2, megatron = logs["fsdp2"], logs["megatron"]
    assert sorted(fsdp2) == sorted(megatron)
    assert len(fsdp2) == 2 + 3 * 9
    for moment, expected in fsdp2.items():
        assert megatron[moment] == expected, moment
    # Equal things that never move would prove nothing.
    assert len({fsdp2[f"{step} state"] for step in (1, 2, 3)}) == 3
    assert float.fromhex(fsdp2["3 metrics"]["train/grad_norm"]) > 0.01


def test_one_gemm_over_the_fused_matrix_is_seen_in_the_gradient(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: Megatron's way (one product over q, k, v) has equal scores, other gradients."""
    samples, digests = made_samples(), {}

    def fused(self: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        rows, groups = hidden.shape[0], self.config.num_query_groups
        width = self.config.kv_channels
        product = numerics.linear(hidden.view(rows, -1), self.weight, self.bias)
        heads = product.view(rows, groups, -1, width)
        queries, key, value = heads.split((heads.shape[2] - 2, 1, 1), dim=2)
        return tuple(part.reshape(rows, -1) for part in (queries, key, value))

    for name in ("shared", "fused"):
        if name == "fused":
            monkeypatch.setattr(layers.QkvLinear, "forward", fused)
        spec = on("megatron", make_spec("bfloat16"))
        with started(spec, folders["qwen2"], tmp_path) as trainer:
            root = trainer.score(samples)
            record = trainer.update(samples, step=1, update=0)
            digests[name] = (root, record.digests["grads"])
    assert digests["shared"][0] == digests["fused"][0]
    assert digests["shared"][1] != digests["fused"][1]


def test_checkpoint_of_megatron_is_the_model_of_fsdp2_and_goes_on_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    spec = on("megatron", make_spec("bfloat16"))
    target, samples = tmp_path / "step-000001", made_samples()
    with started(spec, folders["qwen2"], tmp_path) as trainer:
        trainer.score(samples)
        weights = dict(trainer.update(samples, step=1, update=0).digests["weights"])
        children = psutil.Process().children(recursive=True)
        state = trainer.save(str(target), chain_digest="c" * 32, attempt=1)
        assert psutil.Process().children(recursive=True) == children
        trainer.score(samples)
        whole = trainer.update(samples, step=2, update=0).digests
    assert {path.name for path in target.iterdir()} >= {"metadata.json", ".metadata", "meta.json"}
    assert digest_dcp_model(target, QWEN2) == weights
    with started(on("fsdp2", spec), folders["qwen2"], tmp_path) as trainer:
        trainer.score(samples)
        trainer.update(samples, step=1, update=0)
        assert trainer.save(str(tmp_path / "fsdp2"), chain_digest="c" * 32, attempt=1) == state
    assert digest_dcp_model(tmp_path / "fsdp2", QWEN2) == weights
    assert compare_checkpoints(target, tmp_path / "fsdp2").verdict is Verdict.IDENTICAL
    with started(spec, folders["qwen2"], tmp_path) as trainer:
        trainer.load(str(target))
        assert trainer.state_digest() == state
        trainer.score(samples)
        assert trainer.update(samples, step=2, update=0).digests == whole
    with (
        started(on("fsdp2", spec), folders["qwen2"], tmp_path) as trainer,
        pytest.raises(CheckpointError, match="belongs to trajectory"),
    ):
        trainer.load(str(target))


def test_damaged_and_incomplete_checkpoints_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    spec = on("megatron", make_spec("float32"))
    target, samples = tmp_path / "step-000001", made_samples()
    with started(spec, folders["qwen2"], tmp_path) as trainer:
        trainer.score(samples)
        trainer.update(samples, step=1, update=0)
        trainer.save(str(target), chain_digest="c" * 32, attempt=1)
        (file,) = target.glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged"):
            trainer.load(str(target))
        file.write_bytes(data[: len(data) // 3])
        with pytest.raises(CheckpointError, match="damaged"):
            trainer.load(str(target))
        (target / "metadata.json").unlink()
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            trainer.load(str(target))


def test_a_flipped_bit_of_fused_storage_reaches_what_is_sent(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """What is sent is Megatron's own storage, so a fault there cannot hide behind the masters."""
    with started(on("megatron", make_spec("float32")), folders["qwen2"], tmp_path) as trainer:
        before = dict(trainer.wire_tensors())
        fused = dict(trainer._model.named_parameters())
        weight = fused["decoder.layers.1.self_attention.linear_qkv.weight"]
        with torch.no_grad():
            weight[-1, 0] += 1.0  # the last row: value head of the last group
        after = dict(trainer.wire_tensors())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["model.layers.1.self_attn.v_proj.weight"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_swapped_in_and_back_also_in_the_fused_parameters(
    dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    samples = made_samples()
    with started(on("megatron", make_spec(dtype)), folders["qwen2"], tmp_path) as trainer:
        trainer.score(samples)
        reference = trainer.reference_scores()
        assert reference == trainer.scores()
        trainer.update(samples, step=1, update=0)
        sent = dict(trainer.wire_tensors())
        for _ in range(2):
            trainer.score(samples)
            assert trainer.reference_scores() == reference != trainer.scores()
        after = dict(trainer.wire_tensors())
    assert all(torch.equal(sent[name], after[name]) for name in sent)


def test_deterministic_mode_is_refused_without_its_switches_and_read_back(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = on("megatron", make_spec("float32"))
    with started(spec, folders["qwen2"], tmp_path) as trainer:
        facts = trainer.environment()["megatron"]
        # Its releases add the commit they were made from.
        installed = importlib.metadata.version("megatron-core")
        assert facts["version"].partition("+")[0] == installed.partition("+")[0]
        assert facts["deterministic_mode"] is True
        assert {facts[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "context")} == {1}
        assert facts["variables"]["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
        with pytest.raises(EngineError, match="NVTE_ALLOW_NONDETERMINISTIC_ALGO is '1', not '0'"):
            parallel.check_determinism()
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        monkeypatch.setenv("NCCL_ALGO", "Tree")
        with pytest.raises(EngineError, match="NCCL_ALGO is 'Tree'"):
            parallel.check_determinism("cuda")


def test_no_file_or_function_of_megatron_is_patched_and_nothing_stands_in_for_cuda(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    samples = made_samples(2)
    with started(on("megatron", make_spec("float32")), folders["qwen2"], tmp_path) as trainer:
        trainer.score(samples)
        trainer.update(samples, step=1, update=0)
        trainer.save(str(tmp_path / "step-000001"), chain_digest="c" * 32, attempt=1)
    assert unlike_a_fresh_import("megatron") == []
    assert len(loaded("megatron")) > 2000
    assert replaced_in_memory("torch") == []  # so nothing of ours can be active under CUDA
    changed, checked = changed_files(importlib.metadata.distribution("megatron-core"))
    assert changed == []
    assert checked > 300


def test_a_patched_file_and_a_patched_function_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    info = tmp_path / "fake-1.0.dist-info"
    info.mkdir()
    lines = []
    for name in ("kept.py", "patched.py"):
        (tmp_path / name).write_text("value = 1\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"value = 1\n").digest())
        lines.append(f"{name},sha256={digest.rstrip(b'=').decode()},10")
    (info / "RECORD").write_text("\n".join([*lines, "fake-1.0.dist-info/RECORD,,"]))
    installed = importlib.metadata.PathDistribution(info)
    assert changed_files(installed) == ([], 2)
    (tmp_path / "patched.py").write_text("value = 2\n")
    assert changed_files(installed) == (["patched.py"], 2)
    monkeypatch.setattr(GPTModel, "sharded_state_dict", layers.SwiGlu.forward)
    monkeypatch.setattr(GPTModel, "forward", wrapping(GPTModel.forward))
    monkeypatch.setattr(gpt_model, "has_config_logger_enabled", layers.residual_add)
    monkeypatch.setattr(latent_attention, "HAVE_TE", not latent_attention.HAVE_TE)
    monkeypatch.setattr(torch.cuda, "current_device", layers.slot_params)
    monkeypatch.setattr(torch.cuda, "synchronize", wrapping(torch.cuda.synchronize))
    assert set(replaced_in_memory("torch")) == {
        "torch.cuda.current_device",
        "torch.cuda.synchronize",
    }
    assert set(unlike_a_fresh_import("megatron")) == {
        f"{gpt_model.__name__}.has_config_logger_enabled",
        f"{gpt_model.__name__}.GPTModel.forward",
        f"{gpt_model.__name__}.GPTModel.sharded_state_dict",
        f"{latent_attention.__name__}.HAVE_TE",
    }


def wrapping(honest: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that says it is of the module of what it wraps."""

    @functools.wraps(honest)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return honest(*args, **kwargs)

    assert wrapper.__module__ == honest.__module__
    return wrapper


def replaced_in_memory(package: str) -> list[str]:
    """Names of this package's modules and classes that are, or wrap, a function of ours."""
    ours = tuple(f"{ROOT / folder}/" for folder in ("engines", "model_specs", "tests"))
    return [
        name
        for name, codes in loaded(package).items()
        if any(code.startswith(ours) for code in codes)
    ]


def unlike_a_fresh_import(package: str) -> list[str]:
    """Names that stand for other code or another constant than in a process without ours."""
    here = loaded(package)
    names = [name for name in sys.modules if name.split(".")[0] == package]
    return differing(here, fresh(names))


def changed_files(distribution: importlib.metadata.Distribution) -> tuple[list[str], int]:
    """Installed files whose hash is not the one recorded at installation; how many were read."""
    record = (distribution.read_text("RECORD") or "").splitlines()
    changed, checked = [], 0
    for path, recorded, _ in csv.reader(record):
        if not recorded:
            continue
        algorithm, _, digest = recorded.partition("=")
        content = Path(str(distribution.locate_file(path))).read_bytes()
        checked += 1
        found = base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest())
        if found.rstrip(b"=").decode() != digest:
            changed.append(path)
    return changed, checked
