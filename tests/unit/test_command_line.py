"""What the command line says or refuses at once, without a server, an engine or a file."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

PROGRAM = "import sys; from flows.cli import main; sys.exit(main())"


def said(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Exit code, and what a command prints."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    assert said("--version", cwd=tmp_path) == (0, metadata.version("lockstep-rl") + "\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare a", "two or more runs are needed, not 'a' alone"),
        ("fork nope", "run 'nope': 0 runs match"),
        ("export nope@4", "run 'nope': 0 runs match"),
        ("verify nope --segment 1", "run 'nope': 0 runs match"),
        ("diff mlflow:one mlflow:other", "mlflow:one: there is no MLflow database"),
    ],
)
def test_a_mistake_is_refused_at_once_and_leaves_nothing(
    command: str, message: str, tmp_path: Path
) -> None:
    code, text = said(*command.split(), cwd=tmp_path)
    assert code == 2, text
    assert message in text
    assert "Traceback" not in text
    assert "pydantic" not in text
    assert list(tmp_path.iterdir()) == []
