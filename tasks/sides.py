"""What can be compared, by the name that a user gives: a leg, a lock, a checkpoint, an MLflow run.

    RUN, RUN/LEG, a folder          a leg; RUN stands for its first leg
    RUN/LEG@4, a checkpoint folder  a checkpoint; @0 is the state that the run begins with
    .../lock.json                   a lock
    mlflow:ID, or a bare MLflow id  the leg of that MLflow run, where its folder lies, or else as it
                                    was uploaded: the ledger without digests by name

    with open_sides(("r1", "mlflow:3f2a..."), Path("runs")) as sides: ...

Loads neither Prefect nor torch, and MLflow only where it is asked.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engines import runs
from engines.checkpoint.dcp import META_FILE
from engines.checkpoint.state_diff import StateComparison, compare_checkpoints
from engines.provenance.diff import Comparison, compare_ledgers
from engines.provenance.ledger import LEDGER_FILE
from engines.provenance.lock import LOCK_FILE
from engines.provenance.lock_diff import LockComparison, compare_locks
from model_specs.errors import ArtifactError, SpecError
from tasks.tracking_store import (
    default_tracking_uri,
    prepare_environment,
    sqlite_file,
    without_password,
)

MLFLOW_PREFIX = "mlflow:"
_MLFLOW_ID = re.compile("[0-9a-f]{32}")
_LEG_ARTIFACTS = (LEDGER_FILE, "environment.json", LOCK_FILE)

Kind = Literal["leg", "checkpoint", "lock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the things that are compared."""

    name: str
    """As it was asked for."""
    kind: Kind
    path: Path
    """Folder of the leg or checkpoint, or the lock file."""
    label: str
    """`RUN/LEG`, `RUN/LEG@STEP`, or the path."""


@contextmanager
def open_sides(names: Sequence[str], runs_dir: Path) -> Iterator[tuple[Side, ...]]:
    """Find all sides; what had to be downloaded is deleted at the end.

    Raises:
        SpecError: A name means nothing, or the sides are of different kinds.
        LockstepError: MLflow cannot be reached, or has no ledger of that run.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-compare-") as scratch:
        sides = tuple(
            find_side(name, runs_dir, downloads=Path(scratch) / str(number))
            for number, name in enumerate(names)
        )
        kinds = {side.kind for side in sides}
        if len(kinds) > 1:
            shown = ", ".join(f"{side.name} is a {side.kind}" for side in sides)
            raise SpecError(f"{shown}: only things of one kind can be compared")
        yield sides


def find_side(name: str, runs_dir: Path, *, downloads: Path) -> Side:
    """Find what a name stands for; see `open_sides`."""
    path = Path(name)
    if path.name == LOCK_FILE and path.is_file():
        return Side(name=name, kind="lock", path=path.resolve(), label=name)
    if (path / META_FILE).is_file():
        return Side(name=name, kind="checkpoint", path=path.resolve(), label=name)
    if name.startswith(MLFLOW_PREFIX):
        return _mlflow_side(name, runs_dir, downloads)
    leg, at, step = name.rpartition("@")
    if at and step.isdigit():
        return _checkpoint_side(name, runs.open_leg(leg, runs_dir), int(step))
    try:
        found = runs.open_leg(name, runs_dir)
    except SpecError:
        if _MLFLOW_ID.fullmatch(name):
            return _mlflow_side(name, runs_dir, downloads)
        raise
    return Side(name=name, kind="leg", path=found, label=_label(found))


def compare_sides(
    a: Side, b: Side, *, across: Sequence[str] = ()
) -> Comparison | LockComparison | StateComparison:
    """Compare two sides of one kind.

    Raises:
        ArtifactError: A ledger, lock or checkpoint is missing or damaged.
        SpecError: `across` names a field that does not exist.
    """
    if a.kind == "lock":
        return compare_locks(a.path, b.path, across=across)
    if a.kind == "checkpoint":
        return compare_checkpoints(a.path, b.path)
    return compare_ledgers(a.path, b.path, across=across)


def _label(leg: Path) -> str:
    return f"{leg.parent.name}/{leg.name}"


def _checkpoint_side(name: str, leg: Path, step: int) -> Side:
    if step == 0 and (leg / "dcp").is_dir():
        place = leg / "dcp"
    else:
        place = Path(runs.checkpoint_at(leg, step)[1].uri)
    return Side(name=name, kind="checkpoint", path=place, label=f"{_label(leg)}@{step}")


def _mlflow_side(name: str, runs_dir: Path, downloads: Path) -> Side:
    """The leg of an MLflow run; a parent stands for its first leg."""
    prepare_environment()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    uri = default_tracking_uri(runs_dir / "any run")
    database = sqlite_file(uri)
    if database is not None and not database.is_file():  # MLflow would make one
        raise ArtifactError(
            f"{name}: there is no MLflow database {database}; set MLFLOW_TRACKING_URI or --runs-dir"
        )
    run_id = name.removeprefix(MLFLOW_PREFIX)
    try:
        client = MlflowClient(tracking_uri=uri)
        child, parent = _leg_and_parent(client, run_id)
        leg = child.data.tags["lockstep.leg"]
        label = f"{child.data.tags['lockstep.run_id']}/{leg}"
        local = Path(parent.data.tags.get("lockstep.run_folder", "")) / leg
        if (local / LEDGER_FILE).is_file() and not _is_stale(child, local):
            return Side(name=name, kind="leg", path=local, label=label)
        downloads.mkdir(parents=True)
        client.download_artifacts(parent.info.run_id, "spec.json", str(downloads))
        folder = downloads / leg
        folder.mkdir()
        present = {found.path for found in client.list_artifacts(child.info.run_id)}
        for artifact in _LEG_ARTIFACTS:
            if artifact in present:
                client.download_artifacts(child.info.run_id, artifact, str(folder))
    except (MlflowException, SQLAlchemyError, OSError, KeyError) as error:
        raise ArtifactError(
            f"{name}: MLflow at {without_password(uri)} has no leg of that id with its ledger: "
            f"{without_password(str(error))}. Check MLFLOW_TRACKING_URI, --runs-dir and the id"
        ) from error
    return Side(name=name, kind="leg", path=folder, label=label)


def _leg_and_parent(client: Any, run_id: str) -> tuple[Any, Any]:
    run = client.get_run(run_id)
    parent_id = run.data.tags.get("mlflow.parentRunId")
    if parent_id:
        return run, client.get_run(parent_id)
    children = client.search_runs(
        [run.info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`lockstep.kind` = 'leg'",
        order_by=["tags.`lockstep.leg` ASC"],
    )
    if not children:
        raise KeyError(f"run {run_id} has no legs")
    return children[0], run


def _is_stale(child: Any, local: Path) -> bool:
    """Whether the folder has another history by now than the MLflow run."""
    from tasks.tracked_folder import newest_chain

    synced: str | None = child.data.tags.get("lockstep.chain_digest")
    return newest_chain(local) != synced
