"""The tests of this folder, run in Triton's interpreter by a process that has the real Triton.

Only without a device (`conftest.py`). Where `triton` is a stand-in, the package lies in a folder
that `make test` fills and that nothing else has on its path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.unit.numerics_cuda.conftest import has_triton

HERE = Path(__file__).parent
INTERPRETER = Path(sys.prefix) / "triton-interpreter"


def run(module: Path) -> subprocess.CompletedProcess[str]:
    """Run one module of this folder in a process that sees the real Triton first."""
    path = os.pathsep.join([str(INTERPRETER), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            str(module),
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
        ],
        cwd=HERE.parents[2],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )


def test_the_kernels_hold_their_laws_in_the_interpreter():
    assert has_triton() or (INTERPRETER / "triton").is_dir(), (
        f"{INTERPRETER} has no triton, so no kernel can be run; make test puts it there"
    )
    modules = sorted(path for path in HERE.glob("test_*.py") if path != Path(__file__))
    assert len(modules) >= 4
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(run, modules))
    for module, result in zip(modules, results, strict=True):
        assert result.returncode == 0, module.name + result.stdout[-6000:] + result.stderr[-2000:]
        last = result.stdout.splitlines()[-1]
        found = re.search(r"(\d+) passed", last)
        assert found is not None, last
        assert int(found[1]) >= 8, last
        assert "skipped" not in last
