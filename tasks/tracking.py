"""MLflow as a projection of the run folder: what is there can be sent again at any time.

The run folder is the record; MLflow is for looking. `sync` sends what lies after the last step that
the store is known to have, so that an outage loses nothing, a second call adds nothing, and each
step is there exactly once. It never raises because of the store: a server that is down costs a
warning and a bounded wait.

One parent run a run, one child run a leg, both found again by their tags, so that a fresh process
goes on where the last one stopped. MLflow itself is imported inside the functions (3 s).

    tracked = sync(run_dir, tracking_uri=None, experiment="tiny_cpu")
    print(tracked.ui_command)
    nights = find_runs(tracked.uri, "tiny_cpu", {"lockstep.verdict": "Identical"})

Metrics are stored by MLflow as float64 without a sign of zero, and infinities are clamped; nothing
is ever compared through them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from model_specs.errors import ArtifactError
from tasks.run_folders import mark_sent, unsent_folders, verdict_digest
from tasks.samples_table import MAX_ROWS, newest_samples, samples_table
from tasks.tracked_folder import (
    Leg,
    StepMetrics,
    TrackedFolder,
    file_digest,
    git_tags,
    leg_status,
    leg_tags,
    read_run_folder,
    run_status,
    shortened,
    spec_params,
    spec_tags,
    started_ms,
    verdict_points,
    verdict_tags,
)
from tasks.tracking_store import (
    NO_TAGS,
    FoundRun,
    default_tracking_uri,
    find_runs,
    local_artifacts,
    prepare_environment,
    run_page,
    search,
    ui_command,
    without_password,
)

__all__ = [
    "FoundRun",
    "TrackedRun",
    "default_tracking_uri",
    "find_runs",
    "sync",
    "sync_again",
    "sync_quietly",
    "sync_unsent",
]

logger = logging.getLogger(__name__)

RUN_TAG = "lockstep.run_id"
KIND_TAG = "lockstep.kind"
"""`run` for a parent, `leg` for a child, `comparison` for what `flows.compare` has found."""
LEG_TAG = "lockstep.leg"
SYNCED_TAG = "lockstep.synced_step"
"""Last step whose metrics are all in the store; written after them."""
VALUES_TAG = "lockstep.synced_values"
"""How many metrics of that step; more are there when a crash ended the step before its evaluation,
and a resume brought it."""
SENDING_TAG = "lockstep.sending_step"
"""Last step that a sync set out to send; written before. Greater than the synced step only when
that sync did not end, and then the store's history says what is already there."""
ARTIFACTS_TAG = "lockstep.artifacts"
"""JSON, artifact name -> digest of the content that was uploaded."""

TIME_LIMIT_S = 120.0
"""A sync that took longer leaves the rest to the next one."""
METRICS_PER_BATCH = 1000
ENTRIES_PER_BATCH = 100
"""Limits of one `log_batch` call."""

_PARENT_ARTIFACTS = (
    *("spec.json", "verdict.json", "report.html"),
    *("plots/curves.png", "plots/strip.png", "plots/ulp.png"),
)
_LEG_ARTIFACTS = (
    *("lock.json", "ledger.jsonl", "environment.json"),
    *("gates.json", "metrics.jsonl", "prompts.json"),
)
_SAMPLES_ARTIFACT = "samples.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Where a run is in MLflow, and what of it could not be sent."""

    run_id: str | None
    """MLflow's id of the parent run; None when the store was never reached."""
    child_run_ids: Mapping[str, str]
    """Leg -> MLflow's id of its child run."""
    uri: str
    """Tracking URI, without a password."""
    ui_command: str
    """Shell command that shows the run."""
    page: str | None
    """Address of the run's page; None where the store is a file."""
    problems: tuple[str, ...]
    """What was not sent and why; empty when the store has all that the run folder has."""


def sync(
    run_dir: Path,
    *,
    tracking_uri: str | None,
    experiment: str,
    extra_tags: Mapping[str, str] = NO_TAGS,
) -> TrackedRun:
    """Send what the store does not have yet; call it after each segment and at the end.

    Args:
        run_dir: The run folder: `run.json`, `spec.json`, and a sub-folder with a `ledger.jsonl` for
            each leg.
        tracking_uri: Where to; None takes `default_tracking_uri`.
        experiment: Name of the MLflow experiment; made when it is not there.
        extra_tags: Further tags of the parent run, such as `prefect.flow_run_id`.

    Raises:
        ArtifactError: The run folder itself is not readable. A store that is down does not raise;
            it is logged and named in `problems`.
    """
    verdict = verdict_digest(run_dir)  # before it is read: a newer one is sent by the next sync
    folder = read_run_folder(run_dir)
    uri = tracking_uri or default_tracking_uri(run_dir)
    problems: list[str] = []
    if not folder.legs and folder.kind == "run":
        problems.append(
            f"{folder.path} has no leg: none of its sub-folders has a ledger.jsonl, "
            "so the run has no child in MLflow yet"
        )
    prepare_environment()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    projection = _Projection(folder, uri=uri, experiment=experiment, extra_tags=extra_tags)
    try:
        projection.send()
        mark_sent(folder.path, uri, verdict)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        problems.append(
            f"MLflow at {without_password(uri)} did not take everything of run {folder.run_id}: "
            f"{without_password(str(error))}. Nothing is lost: {folder.path} has it, and the next "
            "sync sends the rest"
        )
    for problem in problems:
        logger.warning("%s", problem)
    return TrackedRun(
        run_id=projection.run_id,
        child_run_ids=MappingProxyType(dict(projection.child_run_ids)),
        uri=without_password(uri),
        ui_command=ui_command(uri, projection.experiment_id, projection.run_id),
        page=run_page(uri, projection.experiment_id, projection.run_id),
        problems=tuple(problems),
    )


def sync_quietly(run_dir: Path, *, extra_tags: Mapping[str, str] = NO_TAGS) -> TrackedRun | None:
    """Sync with the default store, from inside a flow; whatever goes wrong is only logged.

    The experiment is `MLFLOW_EXPERIMENT_NAME`, or else the run's recipe. Inside a Prefect flow run
    its id becomes the tag `prefect.flow_run_id`.

    Returns:
        None when the run folder could not be read, or at an error that nobody foresaw.
    """
    try:
        return _sync_by_default(run_dir, {**_prefect_tags(), **extra_tags})
    except Exception:  # what is for looking must never end a run
        logger.exception("the run folder %s was not sent to MLflow", run_dir)
        return None


def _sync_by_default(run_dir: Path, extra_tags: Mapping[str, str] = NO_TAGS) -> TrackedRun:
    """Sync with the default store and experiment."""
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or read_run_folder(run_dir).spec.recipe
    return sync(run_dir, tracking_uri=None, experiment=experiment, extra_tags=extra_tags)


def sync_again(folders: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Send run folders to the default store; return those it has now, and what was not sent.

    Ends at the first that the store does not take, and when `TIME_LIMIT_S` is over: what is left is
    still found by `unsent_folders` the next time.
    """
    sent: list[str] = []
    deadline = time.monotonic() + TIME_LIMIT_S
    problems: list[str] = []
    for folder in folders:
        if time.monotonic() > deadline:
            return sent, [*problems, f"{folder.name} and older ones: no time was left"]
        try:
            tracked = _sync_by_default(folder)
        except (ArtifactError, OSError, KeyError) as error:  # this folder's fault: others are sent
            logger.warning("%s was not sent to MLflow: %s", folder.name, error)
            problems.append(f"{folder.name}: {error}")
            continue
        if tracked.problems:
            return sent, [*problems, *tracked.problems]
        sent.append(folder.name)
    return sent, problems


def sync_unsent(runs_dir: Path) -> tuple[list[str], list[str]]:
    """Send the runs of a folder that have a verdict which the store does not have.

    Returns what `sync_again` does. A server that was down has missed them; no flow of theirs runs
    any more that would send them.
    """
    return sync_again(unsent_folders(runs_dir))


def _prefect_tags() -> dict[str, str]:
    if "prefect" not in sys.modules:  # then this is no flow run, and importing it takes seconds
        return {}
    from prefect.runtime import flow_run

    flow_run_id = flow_run.id
    return {"prefect.flow_run_id": str(flow_run_id)} if flow_run_id else {}


class _Projection:
    """One sync: knows how far it came, so that an outage half-way still tells the ids."""

    def __init__(
        self, folder: TrackedFolder, *, uri: str, experiment: str, extra_tags: Mapping[str, str]
    ) -> None:
        self.experiment_id: str | None = None
        self.run_id: str | None = None
        self.child_run_ids: dict[str, str] = {}
        self._folder = folder
        self._uri = uri
        self._experiment = experiment
        self._extra_tags = extra_tags
        self._deadline = time.monotonic() + TIME_LIMIT_S
        self._client: Any = None

    def send(self) -> None:
        """Bring the store up to what the run folder holds."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        self.experiment_id = self._find_or_create_experiment()
        params = spec_params(self._folder.spec)
        parent = self._send_parent(params)
        for leg in self._folder.legs:
            self._send_leg(leg, params)
        # The verdict is shown last: whoever sees it can rely on the rest being there.
        self._send_verdict(parent)

    def _find_or_create_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                created = self._client.create_experiment(
                    self._experiment, artifact_location=local_artifacts(self._uri)
                )
            except MlflowException:
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:  # it was not another process that made it meanwhile
                    raise
            else:
                return str(created)
        return str(found.experiment_id)

    def _find_or_create_run(self, name: str, identity: Mapping[str, str], folder: Path) -> Any:
        found = search(self._client, str(self.experiment_id), identity)
        if found:
            return found[0]
        return self._client.create_run(
            self.experiment_id,
            start_time=started_ms(folder),
            tags={**identity, **git_tags(Path(__file__))},
            run_name=name,
        )

    def _send_parent(self, params: Mapping[str, str]) -> Any:
        folder = self._folder
        identity = {RUN_TAG: folder.run_id, KIND_TAG: folder.kind}
        parent = self._find_or_create_run(folder.run_id, identity, folder.path)
        self.run_id = parent.info.run_id
        self._send_params(parent, params)
        tags = {"lockstep.run_folder": str(folder.path), **spec_tags(folder.spec)}
        self._send_tags(parent, {**tags, **self._extra_tags})
        return parent

    def _send_leg(self, leg: Leg, params: Mapping[str, str]) -> None:
        identity = {
            RUN_TAG: self._folder.run_id,
            KIND_TAG: "leg",
            LEG_TAG: leg.name,
            "mlflow.parentRunId": str(self.run_id),
        }
        name = f"{self._folder.run_id}/{leg.name}"
        child = self._find_or_create_run(name, identity, leg.folder)
        self.child_run_ids[leg.name] = child.info.run_id
        self._send_params(child, params)
        self._send_steps(child, leg.steps)
        tags = {
            **spec_tags(self._folder.spec),
            **leg_tags(leg, device=self._folder.spec.execution.device),
        }
        self._send_tags(child, tags)
        self._send_artifacts(child, leg.folder, _LEG_ARTIFACTS, samples=True)
        self._send_status(child, leg_status(self._folder.verdict))

    def _send_steps(self, child: Any, steps: Sequence[StepMetrics]) -> None:
        """Send each step once, also where an earlier sync was cut off between metrics and tag.

        A store need not write a batch as a whole (the SQL store commits metrics before tags), so
        the tag alone cannot be trusted after a sync that did not end: then the history decides.
        """
        from mlflow.entities import Metric, RunTag

        run_id = child.info.run_id
        tags = child.data.tags
        synced, num_values = int(tags.get(SYNCED_TAG, -1)), int(tags.get(VALUES_TAG, -1))
        pending = [
            step
            for step in steps
            if step.step > synced or (step.step == synced and len(step.values) > num_values)
        ]
        if not pending:
            return
        present: set[tuple[str, int]] = set()
        if int(tags.get(SENDING_TAG, -1)) > synced or pending[0].step == synced:
            present = self._points(run_id, {name for step in pending for name in step.values})
        self._client.set_tag(run_id, SENDING_TAG, str(pending[-1].step))
        for batch in _step_batches(pending):
            self._check_time()
            metrics = [
                Metric(name, value, child.info.start_time + step.elapsed_ms, step.step)
                for step in batch
                for name, value in step.values.items()
                if (name, step.step) not in present
            ]
            last = batch[-1]
            done = [RunTag(SYNCED_TAG, str(last.step)), RunTag(VALUES_TAG, str(len(last.values)))]
            self._client.log_batch(run_id, metrics=metrics, tags=done, synchronous=True)

    def _points(self, run_id: str, names: Iterable[str]) -> set[tuple[str, int]]:
        """Return (metric name, step) of every point that the store already has."""
        points = set()
        for name in sorted(names):
            self._check_time()
            for point in self._client.get_metric_history(run_id, name):
                points.add((name, point.step))
        return points

    def _send_verdict(self, parent: Any) -> None:
        from mlflow.entities import Metric

        verdict = self._folder.verdict
        run_id = parent.info.run_id
        points = verdict_points(verdict)
        if points:
            present = {
                (name, point.step, point.value)
                for name in sorted({name for name, _, _ in points})
                for point in self._client.get_metric_history(run_id, name)
            }
            stamp = int((self._folder.path / "verdict.json").stat().st_mtime * 1000)
            missing = [
                Metric(name, value, stamp, step)
                for name, step, value in points
                if (name, step, value) not in present
            ]
            for batch in _chunks(missing, METRICS_PER_BATCH):
                self._check_time()
                self._client.log_batch(run_id, metrics=batch, synchronous=True)
        self._send_tags(parent, verdict_tags(verdict))
        self._send_artifacts(parent, self._folder.path, _PARENT_ARTIFACTS, samples=False)
        self._send_status(parent, run_status(verdict))

    def _send_params(self, run: Any, params: Mapping[str, str]) -> None:
        """Send parameters that are not there; MLflow refuses to change one.

        A run that was extended has another plan: its newest value then stands in a tag.
        """
        from mlflow.entities import Param

        present = run.data.params
        missing = [Param(name, value) for name, value in params.items() if name not in present]
        for batch in _chunks(missing, ENTRIES_PER_BATCH):
            self._check_time()
            self._client.log_batch(run.info.run_id, params=batch, synchronous=True)
        self._send_tags(
            run,
            {
                f"lockstep.changed.{name}": value
                for name, value in params.items()
                if present.get(name, value) != value
            },
        )

    def _send_tags(self, run: Any, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        present = run.data.tags
        changed = [
            RunTag(name, shortened(value))
            for name, value in tags.items()
            if present.get(name) != shortened(value)
        ]
        for batch in _chunks(changed, ENTRIES_PER_BATCH):
            self._check_time()
            self._client.log_batch(run.info.run_id, tags=batch, synchronous=True)

    def _send_artifacts(
        self, run: Any, folder: Path, names: Sequence[str], *, samples: bool
    ) -> None:
        """Upload the files whose content is not the one that was uploaded last."""
        run_id = run.info.run_id
        before: dict[str, str] = json.loads(run.data.tags.get(ARTIFACTS_TAG, "{}"))
        after = dict(before)
        for name in names:
            path = folder / name
            # Digest before upload: a file that grows between the two is sent again next time.
            if path.exists() and (digest := file_digest(path)) != before.get(name):
                self._check_time()
                nested = Path(name).parts[:-1]
                self._client.log_artifact(run_id, str(path), *nested)
                after[name] = digest
        table = folder / "samples.jsonl"
        if samples and table.exists():
            digest = file_digest(table)
            if digest != before.get(_SAMPLES_ARTIFACT):
                self._check_time()
                self._send_samples(run, newest_samples(table))
                after[_SAMPLES_ARTIFACT] = digest
        if after != before:
            self._client.set_tag(run_id, ARTIFACTS_TAG, json.dumps(after, sort_keys=True))

    def _send_samples(self, run: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        run_id = run.info.run_id
        self._client.log_text(run_id, samples_table(rows), _SAMPLES_ARTIFACT)
        logged = [{"path": _SAMPLES_ARTIFACT, "type": "table"}]
        shown = f"{min(len(rows), MAX_ROWS)} of {len(rows)}"
        # The first tag is what makes MLflow show and load the file as a table.
        tags = {"mlflow.loggedArtifacts": json.dumps(logged), "lockstep.samples_shown": shown}
        self._send_tags(run, tags)

    def _send_status(self, run: Any, status: str) -> None:
        if run.info.status == status:
            return
        if status == "RUNNING":
            self._client.update_run(run.info.run_id, status=status)
        else:
            self._client.set_terminated(run.info.run_id, status=status)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the sync took more than {TIME_LIMIT_S:.0f} s")


def _step_batches(steps: Sequence[StepMetrics]) -> Iterator[list[StepMetrics]]:
    """Split into batches of whole steps, none with more than `METRICS_PER_BATCH` values."""
    batch: list[StepMetrics] = []
    size = 0
    for step in steps:
        if batch and size + len(step.values) > METRICS_PER_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(step)
        size += len(step.values)
    if batch:
        yield batch


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
