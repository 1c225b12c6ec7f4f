"""Rewards in processes of their own: a hang, a crash or a `print` cannot harm the run.

Two fresh processes score all samples of a step at the same time: one in their order, the other in
reverse and under another hash seed. What a reward remembers, or lets depend on the order of a set,
then differs between the two; and since no process outlives a step, a run that is resumed scores as
one that was never interrupted. The processes die with the thread that waits for them.

Usage::

    first, second = score_twice(items, spec)     # two values an item, in the order of the items
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from model_specs.errors import EngineError, SpecError
from model_specs.run_spec import RewardSpec

IMPORT_TIMEOUT_S = 600.0
"""Most seconds for a process to start and import the reward; `timeout_s` is for one sample."""

HASH_SEEDS = ("0", "1")
"""PYTHONHASHSEED of the two processes: fixed, so that values repeat, and not the same."""

_PROGRAM = (
    "import os, sys; sys.path += [sys.argv[1], os.getcwd()]; "
    "from engines.rewards.worker import main; main()"
)
"""The current folder comes last, as where a reward is looked up: no copy there may stand in front
of an installed module (without `-P`, `-c` would put it first)."""

_STDERR_CHARACTERS = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """What a reward is given of one sample."""

    request_id: str
    text: str
    label: str
    finish_reason: str
    metadata: str | None = None
    """JSON text; the function gets the value."""


@dataclass(kw_only=True)
class _Worker:
    """One process that scores all items, and what it has answered so far."""

    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    order: list[int]
    """Indices of the items in the order in which this process scores them."""
    deadline: float
    values: dict[int, float] = field(default_factory=dict)
    buffer: bytes = b""
    is_ready: bool = False

    @property
    def is_done(self) -> bool:
        return len(self.values) == len(self.order)

    @property
    def current(self) -> int:
        """Index of the item that is being scored."""
        return self.order[len(self.values)]


def score_twice(items: Sequence[RewardItem], spec: RewardSpec) -> tuple[list[float], list[float]]:
    """Score every item in two fresh processes; return both lists in the order of `items`.

    Raises:
        SpecError: The reward cannot be imported, or its sources have changed since the spec was
            made.
        EngineError: A reward raised, took longer than `spec.timeout_s` seconds, or was no number,
            or a process ended; names the sample.
    """
    if not items:
        return [], []
    with tempfile.TemporaryDirectory(prefix="lockstep-reward-") as folder:
        request = Path(folder, "request.json")
        request.write_text(
            json.dumps({"spec": spec.model_dump_json(), "items": [asdict(item) for item in items]}),
            encoding="ascii",
        )
        orders = [list(range(len(items))), list(reversed(range(len(items))))]
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(_started(request, order, seed))
                for order, seed in zip(orders, HASH_SEEDS, strict=True)
            ]
            _collect(workers, items, spec)
    first, second = ([worker.values[i] for i in range(len(items))] for worker in workers)
    return first, second


@contextlib.contextmanager
def _started(request: Path, order: list[int], hash_seed: str) -> Iterator[_Worker]:
    """Start a process; it is gone when the block is left."""
    root = str(Path(__file__).resolve().parents[2])
    is_reversed = "1" if order and order[0] else "0"
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", _PROGRAM),
                *(root, str(request), is_reversed, str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        try:
            yield _Worker(
                process=process,
                stderr=stderr,
                order=order,
                deadline=time.monotonic() + IMPORT_TIMEOUT_S,
            )
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _collect(workers: Sequence[_Worker], items: Sequence[RewardItem], spec: RewardSpec) -> None:
    """Read answers until every item has its value in every process."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.process.stdout is not None
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while selector.get_map():
            waiting: list[_Worker] = [key.data for key in selector.get_map().values()]
            patience = min(worker.deadline for worker in waiting) - time.monotonic()
            for key, _ in selector.select(max(patience, 0.0)):
                _read(key.data, items, spec)
                if key.data.is_done:
                    selector.unregister(key.fileobj)
            for worker in waiting:
                if not worker.is_done and time.monotonic() > worker.deadline:
                    raise _too_late(worker, items, spec)


def _read(worker: _Worker, items: Sequence[RewardItem], spec: RewardSpec) -> None:
    assert worker.process.stdout is not None
    chunk = os.read(worker.process.stdout.fileno(), 1 << 16)
    if not chunk:
        raise _ended(worker, items, spec)
    *lines, worker.buffer = (worker.buffer + chunk).split(b"\n")
    for line in lines:
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise SpecError(answer["refused"])
        if "error" in answer:
            raise EngineError(
                f"reward {spec.name!r} of sample {items[worker.current].request_id} "
                f"{answer['error']}; its completion: {items[worker.current].text[:200]!r}"
            )
        if "value" in answer:
            worker.values[worker.current] = float.fromhex(answer["value"])
        worker.is_ready = True
        worker.deadline = time.monotonic() + spec.timeout_s


def _too_late(worker: _Worker, items: Sequence[RewardItem], spec: RewardSpec) -> EngineError:
    if not worker.is_ready:
        return EngineError(
            f"reward {spec.name!r}: its process was not ready within {IMPORT_TIMEOUT_S:.0f} s; "
            f"does importing it wait for something? {_stderr_tail(worker)}"
        )
    item = items[worker.current]
    return EngineError(
        f"reward {spec.name!r} of sample {item.request_id} did not end within "
        f"reward.timeout_s={spec.timeout_s} s and was ended; its completion: {item.text[:200]!r}; "
        "correct the reward, or raise the limit"
    )


def _ended(worker: _Worker, items: Sequence[RewardItem], spec: RewardSpec) -> EngineError:
    status = worker.process.wait()
    where = (
        f"at sample {items[worker.current].request_id}" if worker.is_ready else "before it began"
    )
    return EngineError(
        f"reward {spec.name!r}: its process ended with status {status} {where}; "
        f"{_stderr_tail(worker)}"
    )


def _stderr_tail(worker: _Worker) -> str:
    worker.stderr.seek(0)
    text = worker.stderr.read().decode("utf-8", errors="replace").strip()
    return f"it wrote: {text[-_STDERR_CHARACTERS:]}" if text else "it wrote nothing"
