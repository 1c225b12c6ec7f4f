"""A push as the driver conducts it: one bucket at a time, from all trainer ranks to all engines.

Invariant: a bucket is put only after every engine has returned from taking the one before, and the
trainer is told so. Handles and digests pass through here, bytes only by reference. Imports no
torch.

    connect(trainers, engines, spec, rendezvous=path)
    sent, received = push(trainers, engines, spec, version=3)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.cluster import EngineHandle, gather, gather_work
from engines.contracts import Flip
from model_specs.run_spec import RunSpec


def connect(
    trainers: Sequence[EngineHandle],
    engines: Sequence[EngineHandle],
    spec: RunSpec,
    *,
    rendezvous: str | Path,
) -> None:
    """Open the transport of `execution.transport` in every process.

    Args:
        trainers: All ranks, in order.
        engines: All rollout engines, in order.
        spec: The trainer's.
        rendezvous: Path of a file that does not exist yet and that all processes can reach.
    """
    transport = spec.execution.transport
    opened = [
        handle.call("connect", transport, engines=len(engines), rendezvous=str(rendezvous))
        for handle in (*trainers, *engines)
    ]
    gather(opened, what="connection of trainer and engines")


def push(
    trainers: Sequence[EngineHandle],
    engines: Sequence[EngineHandle],
    spec: RunSpec,
    *,
    version: int,
    flip: Flip | None = None,
    keep_to: str | None = None,
) -> tuple[Mapping[str, str], list[Mapping[str, str]]]:
    """Send all weights to all engines; return what was sent and what each engine holds.

    Args:
        trainers: All ranks, in order; what they send is gathered by all of them together.
        engines: All rollout engines, in order.
        spec: Its `execution.transport` says how.
        version: Step whose weights these are.
        flip: With probe `sent` or `received`, one bit is flipped there.
        keep_to: Folder where rank 0 writes `sent.safetensors` and the first engine
            `received.safetensors`.

    Raises:
        EngineError: A tensor is missing, unknown or of another shape, or a process was lost.
    """
    what = f"weight push of version {version}"
    wait = functools.partial(gather_work, what=what, execution=spec.execution)
    begun = wait([t.call("begin_push", flip=flip, keep_to=keep_to) for t in trainers])
    layout = begun[0][0]
    attachments = {index: handle for _, part in begun for index, handle in part.items()}
    wait([e.call("begin_push", layout, attachments.get(i)) for i, e in enumerate(engines)])
    taken: list[int] = []
    for bucket in range(len(layout)):
        puts = [trainer.call("put_bucket", bucket, taken) for trainer in trainers]
        takes = [
            engine.call("take_bucket", bucket, _source(puts, index, spec))
            for index, engine in enumerate(engines)
        ]
        taken = wait([*takes, *puts])[: len(engines)]
    received = wait(
        [
            engine.call("end_push", version=version, flip=flip, keep_to=None if index else keep_to)
            for index, engine in enumerate(engines)
        ]
    )
    sent = wait([t.call("end_push", taken) for t in trainers])
    return sent[0], received


def _source(puts: Sequence[Any], engine: int, spec: RunSpec) -> Any:
    """What a take waits for and is given: a put, or nothing where both sides meet in a group."""
    transport = spec.execution.transport
    if transport == "nccl":
        return None
    return puts[engine % len(puts)] if transport == "cuda_ipc" else puts[0]
