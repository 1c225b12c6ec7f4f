"""A suite that xdist would run wrongly ends at its collection, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
DIVIDED = """
import pytest

@pytest.fixture(scope="module")
def engines():
    return 1

@pytest.fixture
def runner():
    return 1

def test_one(engines):
    pass

def test_other(engines, runner):
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadgroup")])
@pytest.mark.parametrize("divided", [False, True])
def test_a_module_fixture_in_two_groups_ends_the_suite_by_name(
    divided: bool, workers: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"))
    text = DIVIDED if divided else DIVIDED.replace(", runner)", ")")
    (tmp_path / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    if divided:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "fixture 'engines'" in said
        assert "['engines', 'test_it.py']" in said
    else:
        assert done.returncode == 0
        assert "2 passed" in said
