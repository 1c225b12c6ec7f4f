"""The tests of this folder, run in Triton's interpreter by a process that has the real Triton.

Only where `triton` is a stand-in (`conftest.py`). The package lies in a folder that `make setup`
fills and that nothing else has on its path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
INTERPRETER = Path(sys.prefix) / "triton-interpreter"


def test_the_kernels_hold_their_laws_in_the_interpreter():
    assert (INTERPRETER / "triton").is_dir(), (
        f"{INTERPRETER} has no triton, so no kernel can be run; make setup puts it there"
    )
    path = os.pathsep.join([str(INTERPRETER), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE), "-q", "-p", "no:cacheprovider", "-W", "ignore"],
        cwd=HERE.parents[2],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    found = re.search(r"(\d+) passed", result.stdout)
    assert found is not None, result.stdout
    assert int(found[1]) >= 46
    assert "skipped" not in result.stdout.splitlines()[-1]
