"""Memory that a process holds on the device is seen with its process id, and waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engines.gpu_memory import Baseline
from model_specs.errors import EngineError

HOLD = (
    "import torch; held = torch.ones(1 << 30, dtype=torch.uint8, device='cuda'); "
    "torch.cuda.synchronize(); print('held', flush=True); input()"
)


def test_a_process_that_holds_memory_is_named_and_its_end_is_waited_for() -> None:
    at_once, patient = Baseline(wait_s=0.0), Baseline(wait_s=30.0)
    at_once.require_free(what="leg a")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(EngineError, match=rf"process .*{holder.pid} \("):
            at_once.require_only((), what="stage train")
        at_once.require_only({holder.pid}, what="stage train")
        with pytest.raises(EngineError, match=r"GPU \d has \d+ MiB in use"):
            at_once.require_free(what="leg b")
    finally:
        holder.kill()
        holder.wait()
    patient.require_free(what="leg b")
