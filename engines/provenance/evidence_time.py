"""How long this process has spent on evidence: digests, the log-prob gate, the ledger.

Functions that make evidence carry `@evidence`, or `@device_evidence` where they read what a GPU may
still be computing; a call inside another one is counted once. Invariant: the time is only ever
read, so it can decide no bit. Each process has its own count, which the driver reads by
`handle.run("engines.provenance.evidence_time:take_seconds")`.

    @evidence
    def digest_tensor(...): ...

    seconds = take_seconds()    # since the last call
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Count(threading.local):
    """Per thread, so that two threads cannot take each other's call for an outer one."""

    def __init__(self) -> None:
        self.depth = 0


_LOCK = threading.Lock()
_COUNT = _Count()
_SECONDS = [0.0]


def evidence(function: Callable[P, R]) -> Callable[P, R]:
    """Count the seconds of the outermost call of `function`, also when it raises."""

    @functools.wraps(function)
    def counted(*args: P.args, **kwargs: P.kwargs) -> R:
        if _COUNT.depth:
            return function(*args, **kwargs)
        _COUNT.depth = 1
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            _COUNT.depth = 0
            with _LOCK:
                _SECONDS[0] += time.perf_counter() - started

    return counted


def device_evidence(function: Callable[P, R]) -> Callable[P, R]:
    """Count like `evidence`, but not the wait for what the GPU was asked to compute before.

    A digest of a gradient has to wait for the backward that makes it; that is the step's own time.
    """
    counted = evidence(function)

    @functools.wraps(function)
    def waited(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _COUNT.depth:
            _wait_for_device()
        return counted(*args, **kwargs)

    return waited


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")  # a process that has not imported it uses no GPU
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def take_seconds() -> float:
    """Return the wall-clock seconds of evidence since the last call, over all threads."""
    with _LOCK:
        seconds, _SECONDS[0] = _SECONDS[0], 0.0
    return seconds
