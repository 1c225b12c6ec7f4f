"""The pages' commands are run as they are written, one page in one folder, in the page's order.

What is added to `lockstep run` is `SHORT` alone, which leaves out gates that cost a start of native
vLLM each and have tests of their own. A command that is neither run, nor for a GPU, nor named in
`NOT_RUN` fails. The pages take minutes: `make test-user` runs them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engines.checkpoint.tiny_model import write_tiny_model
from model_specs.registry import load_recipe
from tests.flows.command_line import LOCKSTEP, SHORT
from tests.flows.documented import PAGES, ROOT, commands, fences, unmatched
from tests.flows.prefect_server import Server, listening

BY_FIXTURE = "tests/flows/prefect_server.py runs it, with a port and a name of its own"
AS_A_USER = "tests/acceptance/new_user.py --from-scratch does it, in minutes and gigabytes"
BY_GOLDENS = "tests/flows/test_published_ledgers.py does it with a run that it makes"
WHEEL = "lockstep_rl-0.1.0-py3-none-any.whl"
NOT_RUN = {
    "python3.11 -m venv .venv": AS_A_USER,
    f".venv/bin/pip install --no-deps {WHEEL}": AS_A_USER,
    shlex.join(
        ("VENV=$PWD/.venv", f"WHEEL=$PWD/{WHEEL}", "bash", ".venv/share/lockstep/tools/setup.sh")
    ): AS_A_USER,
    "python -m tests.acceptance.new_user NEW_FOLDER --from-scratch": AS_A_USER,
    "make demo": "set-up, which is done, and `DEMO`, which is run in its place",
    "make test": "runs this test",
    "lockstep run gsm8k_smollm2_135m --twin --set model.path=MODEL_DIR "
    "--set data.source=GSM8K_DIR": "a 135M model, which is not in the tree, for an hour",
    "python -m tools.goldens check RUN": BY_GOLDENS,
    "python -m tools.goldens replace RUN": BY_GOLDENS,
    "prefect server start": BY_FIXTURE,
    "prefect work-pool create --type process lockstep": BY_FIXTURE,
    "prefect --no-prompt deploy --all": BY_FIXTURE,
    "prefect worker start --pool lockstep": BY_FIXTURE,
    "python tools/watch_nightly.py https://example.org/hook": "needs a server that is posted to; "
    "tests/flows/test_typed_deployments.py runs it against one of its own",
}
"""Command -> why it is not run here."""
DEMO = "lockstep run tiny_cpu --twin"
"""What `make demo` does after the set-up."""

EXIT_CODES = {
    "night/b@2": 0,
    "lockstep diff night": 10,
    "lockstep diff runs/night": 10,
    "lockstep compare": 10,
    "--inject-flip": 10,
    "lockstep diff first slower": 10,
    "lockstep diff RUN/a OTHER_RUN/a --across seeds": 10,
    "numerics=stock": 13,
}
"""Part of a command -> how it ends; the first that fits. All others end with 0."""


def page_rows() -> Iterator[object]:
    """Pages with a command that is run here."""
    for page in PAGES:
        if any(is_run_here(command) for command in commands(page)):
            yield pytest.param(page, id=page.stem)


def is_run_here(command: str) -> bool:
    is_ours = bool(re.match(r"(\S*/)?lockstep ", command))
    return is_ours and command not in NOT_RUN and not needs_gpu(command)


def needs_gpu(command: str) -> bool:
    """Whether it is for a machine with a GPU; `tests/gpu` is for those."""
    return "cuda" in command


def is_asked_of_the_server(command: str) -> bool:
    return command.startswith("prefect deployment run ")


def test_every_command_is_run_or_named_with_a_reason_and_nothing_else_is() -> None:
    found = {command for page in PAGES for command in commands(page)}
    ran = {command for command in found if is_run_here(command) or is_asked_of_the_server(command)}
    assert {command for command in found - ran if not needs_gpu(command)} == set(NOT_RUN)
    assert len(ran) > 30
    assert DEMO in (ROOT / "Makefile").read_text()


def test_commands_and_outputs_of_a_page_are_found() -> None:
    shell = "```\n$ a/lockstep run x \\\n  --set a=b   # why\nother\n```\n"
    first, second = fences(shell + "1. x\n\n   ```\n   o ...\n   ```\n")
    assert first.commands == ("a/lockstep run x --set a=b",)
    assert not first.is_output
    assert (second.text, second.is_output) == ("o ...", True)
    assert unmatched("took ... s\nall 3", "it\n  took 1.5 s \nall 4\n") == ["all\\ 3"]


def prepare(folder: Path, page: Path) -> None:
    """Put there what a page says that the reader has: files of the names that it uses."""
    write_tiny_model(folder / "MODEL_DIR", load_recipe("tiny_cpu").model, seed=3)
    rows = [f'{{"question": "What is {n} + 2?", "answer": "{n + 2}"}}' for n in range(200)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    shutil.copy(ROOT / "model_specs" / "recipes" / "tiny_cpu.py", folder / "my_recipe.py")
    blocks = list(fences(page.read_text()))
    rewards = [found.text for found in blocks if "def score(" in found.text]
    (folder / "chat.jinja").write_text("".join(b.text for b in blocks if b.language == "jinja"))
    (folder / "my_pkg").mkdir()
    for file in ("my_pkg/__init__.py", "my_pkg/mod.py", "FILE.py"):
        (folder / file).write_text("\n".join(rewards) + "\n")


class Reader:
    """Runs a page's commands in a folder, and knows the runs that ended as they should."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = dict(environment)
        python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, python_path)])
        self.runs: list[str] = []

    def run(self, command: str) -> str:
        """Run a `lockstep` command of a page; return what it printed."""
        wanted = next((code for part, code in EXIT_CODES.items() if part in command), 0)
        names = iter(reversed(self.runs))
        for word in ("OTHER_RUN", "RUN"):
            if re.search(rf"\b{word}\b", command):
                command = re.sub(rf"\b{word}\b", next(names), command)
        words = shlex.split(command)[1:]
        is_new = words[0] == "run" and "--dry-run" not in words
        ended = subprocess.run(
            [str(LOCKSTEP), *words, *(SHORT if is_new else ())],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert ended.returncode == wanted, f"{command}\n{ended.stdout}\n{ended.stderr}"
        if wanted == 0:  # a page goes on from the runs that went well
            self.runs += re.findall(r"^run folder +\S*/(\S+)$", ended.stdout, re.MULTILINE)
        return ended.stdout

    def python(self, text: str) -> None:
        """Run a Python block of a page."""
        ended = subprocess.run(
            [sys.executable, "-c", text],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stderr}"


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One Prefect server for all pages: each command would start its own."""
    with listening(tmp_path_factory.mktemp("prefect"), "--no-services") as found:
        yield found


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", list(page_rows()))
def test_the_commands_of_a_page_work_as_they_are_written(
    page: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    prepare(tmp_path, page)
    reader, printed = Reader(tmp_path, environment), ""
    for fence in fences(page.read_text(encoding="utf-8")):
        if fence.language == "python":
            reader.python(fence.text)
        elif fence.is_output and printed and page.parent.name == "how-to":
            assert unmatched(fence.text, printed) == []
        for command in fence.commands:
            asked = DEMO if command == "make demo" else command
            printed = reader.run(asked) if is_run_here(asked) else ""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_server_takes_every_deployment_run_of_the_pages(server: Server) -> None:
    asked = {
        command for page in PAGES for command in commands(page) if is_asked_of_the_server(command)
    }
    for command in sorted(asked):
        words = [word for word in shlex.split(command)[1:] if word != "--watch"]
        before = server.num_runs()
        accepted = server.prefect(*words, "--start-in", "in 10 hours")
        assert accepted.returncode == 0, f"{command}\n{accepted.stdout}\n{accepted.stderr}"
        assert server.num_runs() == before + 1
