"""Which GPU each process has, in the order of node and PCI bus, and what no placement allows."""

from __future__ import annotations

import random
import subprocess
from typing import Any

import pytest

from engines import placement
from engines.placement import Gpu, node_gpus, place, require_placed, start_on
from engines.rollout.group import engine_env
from engines.train.group import trainer_env
from model_specs.errors import EngineError, SpecError
from model_specs.recipes.tiny_cpu import recipe
from model_specs.run_spec import RunSpec

GPUS = [
    Gpu(node="10.0.0.1", pci_bus_id="00000000:0A:00.0", index=0, uuid="GPU-a", node_id="n1"),
    Gpu(node="10.0.0.1", pci_bus_id="00000000:1B:00.0", index=1, uuid="GPU-b", node_id="n1"),
    Gpu(node="10.0.0.2", pci_bus_id="00000000:0A:00.0", index=0, uuid="GPU-c", node_id="n2"),
    Gpu(node="10.0.0.2", pci_bus_id="00000000:1B:00.0", index=1, uuid="GPU-d", node_id="n2"),
]
SMI = """00000000:1B:00.0, 1, GPU-b
00000000:0A:00.0, 0, GPU-a
"""


def spec_for(**execution: Any) -> RunSpec:
    spec = recipe()
    merged = {**spec.execution.model_dump(), "device": "cuda", **execution}
    return RunSpec.model_validate({**spec.model_dump(), "execution": merged})


def placed(**execution: Any) -> dict[str, str]:
    return {name: gpu.uuid for name, gpu in place(spec_for(**execution), GPUS).items()}


def test_colocated_engines_are_on_the_gpus_of_the_ranks() -> None:
    assert placed(trainer_ranks=2, rollout_engines=3) == {
        "trainer-0": "GPU-a",
        "trainer-1": "GPU-b",
        "rollout-0": "GPU-a",
        "rollout-1": "GPU-b",
        "rollout-2": "GPU-a",
    }


def test_apart_the_engines_have_the_next_gpus_whatever_order_they_were_listed_in() -> None:
    wanted = {
        "trainer-0": "GPU-a",
        "trainer-1": "GPU-b",
        "rollout-0": "GPU-c",
        "rollout-1": "GPU-d",
    }
    spec = spec_for(trainer_ranks=2, rollout_engines=2, placement="separate", transport="nccl")
    for seed in range(5):
        shuffled = random.Random(seed).sample(GPUS, len(GPUS))
        assert {name: gpu.uuid for name, gpu in place(spec, shuffled).items()} == wanted


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    spec = spec_for(trainer_ranks=2, rollout_engines=1, placement="separate", transport="nccl")
    with pytest.raises(EngineError, match="2 GPUs are there and 3 are needed"):
        place(spec, GPUS[:2])
    assert place(spec_for(device="cpu", trainer_ranks=4), ()) == {}


def test_a_process_sees_its_gpu_alone_and_starts_on_its_node() -> None:
    assert start_on(GPUS[3], {"A": "1"}) == {
        "env": {"A": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"},
        "node_id": "n2",
    }
    assert start_on(None, {"A": "1"}) == {"env": {"A": "1"}}


def test_a_process_on_another_gpu_than_its_own_is_named() -> None:
    chosen = {"trainer-0": GPUS[0], "rollout-0": GPUS[1]}
    require_placed(chosen, {"trainer-0": "GPU-a", "rollout-0": "GPU-b"})
    with pytest.raises(EngineError, match=r"rollout-0 has GPU-a, not GPU-b \(10.0.0.1"):
        require_placed(chosen, {"trainer-0": "GPU-a", "rollout-0": "GPU-a"})


def test_gpus_are_listed_in_pci_order_and_only_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = subprocess.CompletedProcess([], 0, stdout=SMI)
    monkeypatch.setattr(placement.subprocess, "run", lambda *a, **k: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [uuid for _, _, uuid in node_gpus()] == ["GPU-a", "GPU-b"]
    for visible in ("1", "GPU-b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert node_gpus() == [("00000000:1B:00.0", 1, "GPU-b")]


@pytest.mark.parametrize(
    ("execution", "remedy"),
    [
        ({"transport": "cuda_ipc", "placement": "separate"}, "set execution.transport=nccl"),
        ({"transport": "nccl", "placement": "colocated"}, "set execution.transport=cuda_ipc"),
    ],
)
def test_a_transport_that_the_placement_cannot_have_is_refused(
    execution: dict[str, str], remedy: str
) -> None:
    with pytest.raises(SpecError, match=remedy):
        spec_for(**execution)


def test_each_role_starts_with_nccl_variables_of_its_own() -> None:
    spec = spec_for()
    trainer, rollout = trainer_env(spec), engine_env(spec)
    assert (trainer["NCCL_ALGO"], rollout["NCCL_ALGO"]) == ("Ring", "allreduce:tree")
    assert trainer["NCCL_NVLS_ENABLE"] == rollout["NCCL_NVLS_ENABLE"] == "0"
