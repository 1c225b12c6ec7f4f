"""A stage waits for memory of processes that have ended, and names those that have not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from engines import gpu_memory
from engines.gpu_memory import Baseline, Usage
from model_specs.errors import EngineError

OTHER = {900: 500}
"""A process that was there before."""


def reader(*readings: tuple[int, Mapping[int, int]]) -> Callable[[], Usage]:
    """Give these readings one after the other, then the last one for ever."""
    left = list(readings)

    def read() -> Usage:
        used, processes = left.pop(0) if len(left) > 1 else left[0]
        return Usage(used_mib=(used,), processes=dict(processes))

    return read


def test_own_engines_and_what_was_there_before_may_hold_memory() -> None:
    baseline = Baseline(reader((600, OTHER), (9000, {**OTHER, 1: 4000, 2: 4000})), wait_s=0)
    baseline.require_only({1, 2}, what="controls")
    with pytest.raises(EngineError, match=r"controls cannot start: process 2 \(4000 MiB\) still"):
        baseline.require_only({1}, what="controls")


def test_a_leg_waits_until_the_memory_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_POLL_S", 0.0)
    Baseline(
        reader((600, OTHER), (9000, {**OTHER, 7: 8000}), (9000, OTHER), (700, OTHER)), wait_s=5
    ).require_free(what="leg b")


def test_memory_that_does_not_come_back_is_named_with_its_processes() -> None:
    baseline = Baseline(reader((600, OTHER), (9000, {**OTHER, 7: 8000})), wait_s=0)
    with pytest.raises(EngineError) as refused:
        baseline.require_free(what="leg b")
    message = str(refused.value)
    assert "process 7 (8000 MiB) still holds GPU memory" in message
    assert "GPU 0 has 9000 MiB in use, 600 MiB before the first leg (processes now: 7, 900)" in (
        message
    )


def test_memory_without_a_visible_process_is_a_fault_of_a_leg_too() -> None:
    baseline = Baseline(reader((600, {}), (9000, {})), wait_s=0)
    baseline.require_only((), what="controls")
    with pytest.raises(EngineError, match="processes now: none visible"):
        baseline.require_free(what="leg b")


def test_what_nvidia_smi_says_of_the_visible_gpus_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "--query-compute-apps=pid,used_memory,gpu_uuid": [
            ["12", "100", "GPU-a"],
            ["12", "50", "GPU-b"],
            ["13", "[N/A]", "GPU-a"],
            ["14", "500", "GPU-hidden"],
        ],
        "--query-gpu=memory.used,uuid": [["151", "GPU-a"], ["0", "GPU-b"], ["500", "GPU-hidden"]],
    }
    monkeypatch.setattr(gpu_memory, "nvidia_smi", said.__getitem__)
    monkeypatch.setattr(gpu_memory, "node_gpus", lambda: [("00", 0, "GPU-a"), ("01", 1, "GPU-b")])
    assert gpu_memory.read_usage() == Usage(used_mib=(151, 0), processes={12: 150, 13: 0})


def test_without_nvidia_smi_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match="nvidia-smi"):
        gpu_memory.read_usage()
