"""A wheel of the project, and environments outside of the checkout that have it installed.

Usage::

    wheel = build_wheel(folder)
    python = borrowed_environment(folder / "env", wheel)     # seconds: dependencies are links
    python = scratch_environment(folder / "env", wheel)      # minutes, 3.6 GB: as a user does it
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engines", "flows", "model_specs", "tasks")
SHIPPED_WITH = ("pyproject.toml", "README.md", "LICENSE")
FOR_THE_ENVIRONMENT = ("constraints", "setup", "tools")
"""Folders with what makes the pinned environment; the wheel carries it as data."""
_IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command to its end and return what it printed.

    Raises:
        RuntimeError: It failed; with the end of its output.
    """
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{command} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    return ended.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy: a stale `build` folder of the checkout would end up in it."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in SHIPPED_WITH:
        shutil.copy(ROOT / name, source / name)
    for name in (*PACKAGES, *FOR_THE_ENVIRONMENT, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=_IGNORED)
    return wheel_of(source, folder / "wheel")


def wheel_of(source: Path, out: Path) -> Path:
    """Build the wheel of a project folder with this interpreter's setuptools."""
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet")
    run(*pip, "--wheel-dir", out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


def borrowed_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment whose dependencies are links into this one; return its interpreter.

    The project is not among what is linked: it comes from the wheel alone, whose requirements pip
    checks against the links.
    """
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    ours = {file.parts[0] for file in distribution("lockstep-rl").files or ()}
    links = folder / "dependencies"
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in ours and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{links}\n")
    install(python, wheel)
    return python


def install(python: Path, wheel: Path) -> None:
    """Install a wheel whose requirements are there already."""
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", wheel)


def scratch_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment from nothing but the wheel and a package index, as docs say."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    run(base, "-m", "venv", folder)
    run(folder / "bin" / "pip", "install", "--no-deps", wheel)
    setup = folder / "share" / "lockstep" / "tools" / "setup.sh"
    print(run("bash", setup, PYTHON=str(base), VENV=str(folder), WHEEL=str(wheel)))
    return folder / "bin" / "python"
