"""A save holds less than a second copy of the state: it is read back one kind of tensors at a time.

In a process of its own, whose peak memory is the save's alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.command_line import ROOT

MIB = 2**20
KIND_MIB = 24
PROGRAM = """
import json, resource, sys, torch
from pathlib import Path
from engines.checkpoint.dcp import CheckpointMeta, write_checkpoint

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def save(folder, step, mib):
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    tensors = {f"{kind}.{i}": torch.full((mib * 2**18 // 4,), float(i))
               for kind in kinds for i in range(4)}
    meta = CheckpointMeta(trajectory="t", step=step, updates=step, samples_consumed=1,
                          state_digest="s", chain_digest="c", attempt=1)
    before = peak_mib()
    write_checkpoint(Path(folder, f"step-{step:06d}"), tensors, meta=meta)
    return peak_mib() - before

save(sys.argv[1], 1, 1)  # what the first save imports and keeps
print(json.dumps(save(sys.argv[1], 2, int(sys.argv[2]))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="not run: ru_maxrss is in KiB on Linux alone")
def test_a_save_takes_less_memory_than_the_state_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(KIND_MIB)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    # One kind of three is there twice while it is compared, and what is written is streamed.
    assert json.loads(done.stdout) < 2.5 * KIND_MIB
    written = sum(p.stat().st_size for p in (tmp_path / "step-000002").glob("*.distcp"))
    assert written > 3 * KIND_MIB * MIB
