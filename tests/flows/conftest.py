"""Real engines, started once: a runner that executes many small legs on one open session."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.contracts import ArtifactRef, Flip
from engines.gates.logprobs import LogprobGate
from engines.provenance.ledger import Ledger, read_ledger
from engines.runs import new_run
from model_specs.json_text import read_json
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tasks import convert, download, gates, session, train
from tests.flows.command_line import SHORT, CommandLine, Ended, clean_environment
from tests.flows.mlflow_server import free_port
from tests.flows.prefect_server import Server, listening, serving


@dataclasses.dataclass(kw_only=True)
class Runner:
    """Runs legs of a few steps, each in a folder of its own, on engines that are already up."""

    opened: session.LegSession
    weights: ArtifactRef
    names: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @contextmanager
    def leg(self, *overrides: str, flip: Flip | None = None) -> Iterator[session.LegSession]:
        """A fresh leg; overrides may only change what the driver decides (seeds, loss, plan)."""
        leg = f"leg{next(self.names)}"
        folder = self.opened.run_dir / leg
        folder.mkdir()
        sibling = dataclasses.replace(
            self.opened,
            name=f"{self.opened.name}-{leg}",
            leg=leg,
            spec=apply_overrides(self.opened.spec, overrides),
            flip=flip,
            gates={},
            unequal_pushes=[],
            gate=LogprobGate(),
            groups_with_variance=0,
            changed_weights=0,
            max_grad_norm=0.0,
        )
        session._OPEN[sibling.name] = sibling
        try:
            yield sibling
        finally:
            del session._OPEN[sibling.name]

    def run(self, *overrides: str, steps: int = 2, flip: Flip | None = None) -> Path:
        """Run steps 1 to `steps` from the initial weights; returns the leg's folder."""
        with self.leg(*overrides, flip=flip) as sibling:
            train.train_segment.fn(sibling.name, self.weights, start_step=0, to_step=steps)
            return sibling.folder


@contextmanager
def started(folder: Path, *overrides: str) -> Iterator[Runner]:
    """Download, convert and start the engines of the tiny recipe."""
    spec = apply_overrides(load_recipe("tiny_cpu"), overrides)
    run = new_run(spec, folder)
    with session.leg_session(spec, run_dir=run.folder, leg="a", fence=run.fence) as opened:
        inputs = download.download.fn(opened.name)
        weights = convert.convert.fn(opened.name, inputs.model)
        train.start_engines.fn(opened.name, inputs.model, inputs.data, weights)
        gates.preflight.fn(opened.name)
        yield Runner(opened=opened, weights=weights)


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One session of the tiny recipe for all tests that only need some steps."""
    with started(tmp_path_factory.mktemp("runs")) as running:
        yield running


@pytest.fixture(scope="session")
def reference(runner: Runner) -> Path:
    """A leg of three steps without any fault."""
    return runner.run(steps=3)


@pytest.fixture(scope="session")
def lockstep_alone(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """The command line as in a fresh shell: each command has a Prefect server of its own."""
    folder = tmp_path_factory.mktemp("command line")
    return CommandLine(
        runs_dir=folder / "runs", environment=clean_environment(folder / "prefect home")
    )


@pytest.fixture(scope="session")
def lockstep(
    lockstep_alone: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CommandLine]:
    """The command line where a Prefect server is up, whose start takes as long as many a test."""
    with listening(tmp_path_factory.mktemp("prefect"), "--no-services") as environment:
        yield dataclasses.replace(lockstep_alone, environment=environment)


@pytest.fixture(scope="session")
def twin(lockstep_alone: CommandLine) -> Ended:
    """The main job as a user runs it: two legs of eight steps with all gates and controls."""
    return lockstep_alone("run", "tiny_cpu", "--twin", "--run-id", "twin")


@pytest.fixture(scope="session")
def tracking_port() -> int:
    """A port on which no tracking server is up, until a test starts one."""
    return free_port()


@pytest.fixture(scope="session")
def flipped(lockstep: CommandLine, tracking_port: int) -> Ended:
    """A twin of two steps with one bit flipped, while its MLflow server is down.

    Every step has its checkpoint and its dumped rollout.
    """
    down = {**lockstep.environment, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{tracking_port}"}
    run = dataclasses.replace(lockstep, environment=down)
    return run(
        *("run", "tiny_cpu", "--twin", "--json", "--run-id", "flipped"),
        *("--inject-flip", "step=2,probe=grads", "--set", "plan.num_steps=2", *SHORT),
        *("--set", "plan.checkpoint_every=1", "--set", "plan.dump_rollouts=true"),
    )


@pytest.fixture(scope="session")
def twin_folder(lockstep: CommandLine, twin: Ended) -> Path:
    """The run folder of the main job."""
    return lockstep.runs_dir / "twin"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prefect server with the shipped deployments, and a worker."""
    with serving(tmp_path_factory.mktemp("deployment")) as running:
        yield running


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """A night of the shipped deployment, watched to its end."""

    code: int
    flow_run: Mapping[str, Any]
    folder: Path

    @property
    def details(self) -> dict[str, Any]:
        """What it wrote to verdict.json."""
        details: dict[str, Any] = read_json(self.folder / "verdict.json")
        return details


@pytest.fixture(scope="session")
def first_night(server: Server) -> Night:
    """All is varied, and there is no night before it."""
    code, flow_run = server.watch_nightly("first")
    return Night(code=code, flow_run=flow_run, folder=server.folder / "runs" / "first")


@pytest.fixture(scope="session")
def second_night(server: Server, first_night: Night) -> Night:
    """Leg b has one bit flipped, and nothing else is varied; leg a compares with the first."""
    assert first_night.code == 0, first_night.details["headline"]
    flip = {"step": 1, "probe": "grads"}
    code, flow_run = server.watch_nightly("second", inject_flip=flip, vary=[])
    return Night(code=code, flow_run=flow_run, folder=server.folder / "runs" / "second")


@pytest.fixture(scope="session")
def spec() -> RunSpec:
    """The tiny recipe."""
    return load_recipe("tiny_cpu")


def ledger(folder: Path) -> Ledger:
    """The ledger of a leg."""
    return read_ledger(folder)
