"""Buckets on their way: by a shared buffer, by a broadcast, and what is refused on either."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from engines.weights import device_memory, layout, transport
from engines.weights.layout import Layout, TensorMeta, plan_buckets, require_bucket
from engines.weights.transport import Receiver, Sender, SharedSender, open_receiver, open_sender
from model_specs.errors import EngineError

TENSORS = {
    "embedding": torch.arange(700 * 600, dtype=torch.float32).reshape(700, 600).bfloat16(),
    "bias": torch.tensor([0.0, -0.0, float("nan"), 1e-40]).bfloat16(),
    "norm": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "wide": torch.randn(64, 9000, generator=torch.Generator().manual_seed(1)).bfloat16(),
}
METAS = [TensorMeta(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in TENSORS.items()]
LAYOUT = plan_buckets(METAS, bucket_mib=1)


def batch(bucket: layout.Bucket) -> list[tuple[str, torch.Tensor]]:
    return [(meta.name, TENSORS[meta.name]) for meta in bucket]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def ends(kind: str, folder: Path, *, engines: int = 1) -> tuple[Sender, list[Receiver]]:
    """Open both ends in threads: members of a group wait for each other."""
    path = str(folder / "rendezvous")
    with ThreadPoolExecutor() as pool:
        sender = pool.submit(
            open_sender, kind, device="cpu", rank=0, world_size=1, engines=engines, rendezvous=path
        )
        receivers = [
            pool.submit(
                open_receiver,
                kind,
                device="cpu",
                engine_index=index,
                engines=engines,
                rendezvous=path,
            )
            for index in range(engines)
        ]
        return sender.result(60), [receiver.result(60) for receiver in receivers]


def pushed(kind: str, sender: Sender, receivers: list[Receiver]) -> list[dict[str, torch.Tensor]]:
    attachments: Mapping[int, Any] = sender.begin(LAYOUT)
    found: list[dict[str, torch.Tensor]] = [{} for _ in receivers]
    for index, receiver in enumerate(receivers):
        receiver.begin(LAYOUT, attachments.get(index))
    with ThreadPoolExecutor() as pool:
        for number, bucket in enumerate(LAYOUT):
            put = pool.submit(sender.put, number, batch(bucket))
            payload = put.result(60) if kind != "nccl" else None
            takes = [pool.submit(receiver.take, number, payload) for receiver in receivers]
            put.result(60)
            for index, take in enumerate(takes):
                found[index] |= {name: tensor.clone() for name, tensor in take.result(60)}
    for receiver in receivers:
        receiver.end()
    sender.end()
    return found


def test_buckets_hold_at_most_their_size_and_everything_in_order() -> None:
    assert [[meta.name for meta in bucket] for bucket in LAYOUT] == [
        ["embedding", "bias", "norm"],
        ["wide"],
    ]
    assert layout.buffer_bytes(LAYOUT) == 64 * 9000 * 2
    assert plan_buckets(METAS, bucket_mib=8) == (tuple(METAS),)


@pytest.mark.parametrize("kind", ["host", "cuda_ipc", "nccl"])
def test_every_bit_arrives_at_every_engine_push_after_push(kind: str, tmp_path: Path) -> None:
    sender, receivers = ends(kind, tmp_path, engines=2)
    for _ in range(3):
        for found in pushed(kind, sender, receivers):
            assert list(found) == list(TENSORS)
            for name, tensor in TENSORS.items():
                assert torch.equal(bits(found[name]), bits(tensor)), name


def test_nothing_of_a_push_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_shared_folder", lambda: str(tmp_path))
    sender, receivers = ends("cuda_ipc", tmp_path)
    sender.begin(LAYOUT)
    (file,) = tmp_path.glob("lockstep-push-*")
    assert file.stat().st_size == layout.buffer_bytes(LAYOUT)
    sender.end()
    assert not list(tmp_path.glob("lockstep-push-*"))
    for _ in range(20):
        pushed("cuda_ipc", sender, receivers)
    assert not list(tmp_path.glob("lockstep-push-*"))


def test_a_push_that_breaks_off_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_shared_folder", lambda: str(tmp_path))
    sender, (receiver,) = ends("cuda_ipc", tmp_path)
    sender.begin(LAYOUT)  # and nobody took it
    receiver.begin(LAYOUT, sender.begin(LAYOUT)[0])
    assert len(list(tmp_path.glob("lockstep-push-*"))) == 1
    sender.put(0, batch(LAYOUT[0]))
    assert not list(tmp_path.glob("lockstep-push-*"))
    found = dict(receiver.take(0, None))
    assert all(torch.equal(bits(found[meta.name]), bits(TENSORS[meta.name])) for meta in LAYOUT[0])


def test_a_bucket_that_was_not_taken_is_not_overwritten() -> None:
    transport.require_taken(0, [], engines=2)
    transport.require_taken(2, [1, 1], engines=2)
    for index, taken in ((1, []), (1, [0]), (2, [1, 0]), (1, [0, 0, 0])):
        with pytest.raises(EngineError, match=f"bucket {index} of a push would overwrite"):
            transport.require_taken(index, taken, engines=2)


def test_without_waiting_a_receiver_reads_the_next_bucket(tmp_path: Path) -> None:
    """The control of the guard above: what is taken is the buffer itself."""
    sender, (receiver,) = ends("cuda_ipc", tmp_path)
    two: Layout = ((METAS[2],), (METAS[2],))
    receiver.begin(two, sender.begin(two)[0])
    sender.put(0, [("norm", torch.ones(3).bfloat16())])
    ((_, taken),) = receiver.take(0, None)
    sender.put(1, [("norm", torch.zeros(3).bfloat16())])
    assert torch.equal(taken, torch.zeros(3).bfloat16())


@pytest.mark.parametrize("kind", ["host", "cuda_ipc"])
def test_what_may_still_be_on_its_way_is_refused(kind: str, tmp_path: Path) -> None:
    sender, _ = ends(kind, tmp_path)
    sender.begin(((METAS[2],),))
    pending = AsyncCollectiveTensor(TENSORS["norm"])
    with pytest.raises(EngineError, match="norm is a AsyncCollectiveTensor, not a plain tensor"):
        sender.put(0, [("norm", pending)])
    sender.put(0, [("norm", pending.elem)])


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ([("bias", TENSORS["norm"])], "missing: norm; unknown: bias"),
        ([], "missing: norm"),
        ([("norm", TENSORS["norm"].float())], "of another kind: norm float32"),
        ([("norm", TENSORS["bias"])], "of another kind: norm"),
    ],
)
def test_a_bucket_that_is_not_what_its_layout_says_is_refused(
    sent: list[tuple[str, torch.Tensor]], says: str
) -> None:
    with pytest.raises(EngineError, match=f"bucket 0 of the push is not .*{says}"):
        require_bucket(0, (METAS[2],), sent)
    require_bucket(0, (METAS[2],), [("norm", TENSORS["norm"])])


def test_a_bucket_in_another_order_is_refused() -> None:
    tensors = [(meta.name, TENSORS[meta.name]) for meta in METAS]
    require_bucket(0, tuple(METAS), tensors)
    with pytest.raises(EngineError, match="in another order"):
        require_bucket(0, tuple(METAS), tensors[::-1])


def test_memory_without_an_ipc_handle_is_refused_before_it_is_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_memory, "_allocated", lambda size: torch.empty(size))
    monkeypatch.setattr(device_memory, "_is_ipc_capable", lambda pointer: True)
    exported = []
    monkeypatch.setattr(device_memory, "export", lambda buffer: exported.append(buffer))
    monkeypatch.setattr(transport, "export", lambda buffer: exported.append(buffer))
    SharedSender(torch.device("cuda"), engines=[0, 1]).begin(LAYOUT)
    assert len(exported) == 2
    monkeypatch.setattr(device_memory, "_is_ipc_capable", lambda pointer: False)
    with pytest.raises(EngineError, match="virtual memory management"):
        SharedSender(torch.device("cuda"), engines=[0]).begin(LAYOUT)
    assert len(exported) == 2
