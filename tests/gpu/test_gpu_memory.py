"""Memory that a process holds on the device is seen with its process id, and waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engines.gpu_memory import Baseline, read_usage
from model_specs.errors import EngineError

HOLD = (
    "import torch; held = torch.ones(1 << 30, dtype=torch.uint8, device='cuda'); "
    "torch.cuda.synchronize(); print('held', flush=True); input()"
)


def test_a_process_that_holds_memory_is_named_and_its_end_is_waited_for() -> None:
    at_once, patient = Baseline(wait_s=0.0), Baseline(wait_s=30.0)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert read_usage().processes[holder.pid] > 1024
        with pytest.raises(EngineError, match=rf"process {holder.pid} \(\d+ MiB\) still holds"):
            at_once.require_only(others_than(holder.pid), what="stage train")
        at_once.require_only(read_usage().processes, what="stage train")
    finally:
        holder.kill()
        holder.wait()
    patient.require_only(others_than(holder.pid), what="leg b")


def others_than(pid: int) -> set[int]:
    """Other programs may be on this GPU, and come and go; they are none of this test's."""
    return read_usage().processes.keys() - {pid}
