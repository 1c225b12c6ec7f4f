"""Memory that two processes map: bits arrive, memory stays flat, what has no handle is refused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engines.memory import process_memory
from engines.train.sleep import Resident
from engines.weights.device_memory import exportable
from engines.weights.layout import TensorMeta, plan_buckets
from engines.weights.transport import SharedSender, open_receiver
from model_specs.errors import EngineError

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

METAS = [TensorMeta(name=str(i), dtype="bfloat16", shape=(1 << 20, 4)) for i in range(6)]
LAYOUT = plan_buckets(METAS, bucket_mib=16)
PUSHES = 20


def values(push: int, name: str) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(100 * push + int(name))
    return torch.randn(1 << 20, 4, device="cuda", dtype=torch.bfloat16, generator=generator)


def receive(pipe: Any) -> None:
    """The other process: says of each bucket whether it is what was meant."""
    receiver = open_receiver("cuda_ipc", device="cuda", engine_index=0, engines=1, rendezvous="")
    for push in range(PUSHES):
        receiver.begin(LAYOUT, pipe.recv())
        pipe.send("begun")
        for index in range(len(LAYOUT)):
            pipe.recv()
            taken = receiver.take(index, None)
            pipe.send(all(torch.equal(tensor, values(push, name)) for name, tensor in taken))
            del taken
        receiver.end()
        pipe.send(torch.cuda.memory_reserved())


def test_twenty_pushes_arrive_bit_for_bit_and_leave_no_memory_behind() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=receive, args=(other,))
    process.start()
    sender = SharedSender(torch.device("cuda", 0), engines=[0])
    used, reserved = [], []
    try:
        for push in range(PUSHES):
            pipe.send(sender.begin(LAYOUT)[0])
            assert pipe.recv() == "begun"
            for index, bucket in enumerate(LAYOUT):
                sender.put(index, [(meta.name, values(push, meta.name)) for meta in bucket])
                pipe.send(index)
                assert pipe.recv() is True, (push, index)
            reserved.append(pipe.recv())
            sender.end()
            used.append(process_memory())
    finally:
        process.join(60)
        process.kill()
    assert max(used[3:]) <= used[2] + 2
    assert len(set(reserved[2:])) == 1


@pytest.fixture
def expandable() -> Iterator[None]:
    """Have torch allocate through virtual memory management, as a sleeping allocator does."""
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    yield
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_memory_of_virtual_memory_management_is_refused(expandable: None) -> None:
    with pytest.raises(EngineError, match="virtual memory management"):
        exportable(64 * 2**20)


def test_plain_memory_is_exportable() -> None:
    """The control of the test above."""
    torch.cuda.empty_cache()
    assert exportable(64 * 2**20).is_cuda


def test_a_sleeping_tensor_has_no_memory_on_the_device() -> None:
    big = torch.arange(256 * 2**20, dtype=torch.float32, device="cuda")
    view, total = big[7:9].clone(), big.double().sum()
    resident = Resident(lambda: [big])
    figures = resident.sleep()
    assert figures["before_mib"] - figures["after_mib"] >= 1024
    resident.wake()
    assert torch.equal(big[7:9], view)
    assert torch.equal(big.double().sum(), total)
