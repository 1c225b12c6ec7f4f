"""One drill with all faults, run as a user runs it, for all tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.flows.command_line import ROOT, clean_environment


@pytest.fixture(scope="session")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `lockstep drill --all --json` printed, with its exit code under `code`."""
    folder = tmp_path_factory.mktemp("drill")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "flows.cli", "drill", "--all", "--json"),
            *("--runs-dir", str(folder / "runs"), "--run-id", "drill"),
        ],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=clean_environment(folder / "prefect home", PYTHONPATH=os.pathsep.join([str(ROOT)])),
        cwd=ROOT,
    )
    assert done.stdout.startswith("{"), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    details: dict[str, Any] = json.loads(done.stdout)
    return {**details, "code": done.returncode, "folder": Path(details["folder"])}
