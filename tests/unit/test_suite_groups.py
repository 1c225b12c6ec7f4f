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
    said = run(tmp_path, *workers)
    if divided:
        assert "fixture 'engines'" in said
        assert "['engines', 'test_it.py']" in said
    else:
        assert "2 passed" in said


def run(folder: Path, *workers: str) -> str:
    """What a suite says."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == (" passed" in said), said
    return said


def test_a_worker_that_ends_at_its_collection_says_why(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"))
    (tmp_path / "test_it.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "test_other.py").write_text("raise SystemExit('no such machine')\n")
    said = run(tmp_path, "-n", "2", "--dist", "loadgroup")
    assert "ended at its collection: SystemExit: no such machine" in said


def test_a_suite_that_xdist_does_not_group_ends(tmp_path: Path) -> None:
    text = CONFTEST.read_text(encoding="utf-8")
    grouped = "item.add_marker(pytest.mark.xdist_group(group_of(item)))"
    assert grouped in text
    (tmp_path / "conftest.py").write_text(text.replace(grouped, "pass"))
    (tmp_path / "test_it.py").write_text("def test_one():\n    pass\n")
    said = run(tmp_path, "-n", "2", "--dist", "loadgroup")
    assert "groups 0 of 1 tests" in said


def test_absl_is_not_given_the_stream_that_is_captured_into(tmp_path: Path) -> None:
    (tmp_path / "absl").mkdir()
    (tmp_path / "absl" / "__init__.py").touch()
    (tmp_path / "absl" / "logging.py").write_text("import sys\nkept = sys.stderr\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"))
    (tmp_path / "test_it.py").write_text(
        "import sys\nfrom absl import logging\n\n"
        "def test_one():\n"
        "    assert logging.kept is sys.__stderr__\n"
        "    assert logging.kept is not sys.stderr\n"
    )
    assert "1 passed" in run(tmp_path)
