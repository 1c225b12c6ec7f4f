"""Which run tonight is compared with: an explicit baseline, or the last green night.

Both are found by tags of MLflow's parent runs: same trajectory, same device class, whatever the
environment or commit. An explicit baseline is a tag that `lockstep baseline set` puts on a run; it
wins until it is taken off again. The run folders beside tonight's say the same, and answer for what
the store does not have, or while it is down.

    found = find_baseline(run.folder, spec, device_class="cpu/x86_64")
    found.folder, found.note
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engines.environment import device_class
from engines.provenance.verdict import Verdict
from engines.runs import legs, read_spec, write_json
from model_specs.errors import LockstepError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.json_text import read_json
from model_specs.recorded_spec import recorded, recorded_differences
from model_specs.run_spec import RunSpec
from tasks import tracking
from tasks.run_folders import BASELINE_MARK, runs_on_disk
from tasks.tracking_store import (
    FoundRun,
    default_tracking_uri,
    find_runs,
    prepare_environment,
    without_password,
)

BASELINE_TAG = "lockstep.baseline"
"""When it was set (UTC); on an explicit baseline alone."""
REASON_TAG = "lockstep.baseline_reason"
NIGHT_TAG = "lockstep.night"
DEVICE_TAG = "lockstep.device_class"
LEG = "a"
"""Leg of the baseline that is compared with tonight's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What tonight is compared with; without a folder there is none, and `note` says why."""

    note: str
    run_id: str | None = None
    folder: Path | None = None
    is_explicit: bool = False
    commit: str | None = None


def find_baseline(folder: Path, spec: RunSpec, *, device: str, own: bool = False) -> Baseline:
    """Return the explicit baseline of this trajectory and device class, or its last green night.

    A green night whose run folder is gone is passed over, and named; an explicit baseline is not.

    Args:
        folder: Tonight's run folder.
        spec: Its resolved spec.
        device: Its device class.
        own: Let the run be a baseline itself, as it is for the next night.

    Raises:
        LockstepError: MLflow cannot be read and the run folders have no green night of this recipe
            either, or an explicit baseline has no ledger any more.
    """
    same = {
        "lockstep.kind": "run",
        "lockstep.trajectory_fingerprint": trajectory_fingerprint(spec),
        DEVICE_TAG: device,
    }
    found, is_read = _known_runs(folder, spec, same)
    explicit = [run for run in found if BASELINE_TAG in run.tags]
    if explicit:
        chosen = explicit[0]
        if not _has_ledger(chosen):
            raise LockstepError(
                f"the baseline {_name(chosen)} has no ledger at {_folder(chosen) / LEG}; put its "
                f"folder back, or `lockstep baseline unset {_name(chosen)}`"
            )
        reason = chosen.tags.get(REASON_TAG)
        because = f", because: {reason}" if reason else ""
        note = f"baseline {_name(chosen)}, set {chosen.tags[BASELINE_TAG]}{because}"
        return _baseline(chosen, note + _whence(chosen, is_read=is_read), is_explicit=True)
    nights = [
        run
        for run in found
        if run.tags.get(NIGHT_TAG) == "true"
        and run.tags.get("lockstep.verdict") == Verdict.IDENTICAL
        and (own or _name(run) != folder.name)
    ]
    gone = [_name(run) for run in nights if not _has_ledger(run)]
    passed_over = f"; the folders of {', '.join(gone)} are gone" if gone else ""
    for chosen in nights:
        if _has_ledger(chosen):
            whence = _whence(chosen, is_read=is_read)
            return _baseline(chosen, f"last green night {_name(chosen)}{whence}{passed_over}")
    return Baseline(
        note=f"no green night of this trajectory on {device}{passed_over}"
        + _other_trajectory(folder, spec, device)
        + ("" if is_read else "; MLflow cannot be read, so the run folders alone were searched")
    )


def _known_runs(
    folder: Path, spec: RunSpec, tags: Mapping[str, str]
) -> tuple[list[FoundRun], bool]:
    """Return the runs with these tags, newest first, and whether the store was read.

    Those of the store, and of the folders beside tonight's those that it does not have.
    """
    everything = runs_on_disk(folder.parent)
    on_disk = [run for run in everything if all(run.tags.get(tag) == tags[tag] for tag in tags)]
    try:
        stored = _runs(folder, spec, tags)
    except LockstepError as error:
        if not any(
            _name(run) != folder.name
            and run.tags["lockstep.recipe"] == spec.recipe
            and run.tags.get(DEVICE_TAG) == tags[DEVICE_TAG]
            for run in everything
        ):
            raise LockstepError(
                f"{error}; and {folder.parent} has no other night of {spec.recipe} on "
                f"{tags[DEVICE_TAG]} that would say what to compare with"
            ) from error
        return on_disk, False
    names = {_name(run) for run in stored}
    # A store that is newer than the run does not have what makes it an explicit baseline.
    marks = {_name(run): run.tags for run in on_disk if BASELINE_TAG in run.tags}
    marked = [
        replace(run, tags={**run.tags, **_of_baseline(marks.get(_name(run), {}))}) for run in stored
    ]
    found = [*marked, *(run for run in on_disk if _name(run) not in names)]
    return sorted(found, key=lambda run: run.started_ms, reverse=True), True


def _of_baseline(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: tags[name] for name in (BASELINE_TAG, REASON_TAG) if name in tags}


def _whence(run: FoundRun, *, is_read: bool) -> str:
    """Say of a run that is not from the store where it was found."""
    if run.run_id:
        return ""
    why = "does not have it" if is_read else "cannot be read"
    return f", found by its folder since MLflow {why}"


def _other_trajectory(folder: Path, spec: RunSpec, device: str) -> str:
    """Name the fields by which the last green night of this recipe is another trajectory."""
    tags = {
        "lockstep.kind": "run",
        "lockstep.recipe": spec.recipe,
        NIGHT_TAG: "true",
        "lockstep.verdict": str(Verdict.IDENTICAL),
        DEVICE_TAG: device,
    }
    for run in _known_runs(folder, spec, tags)[0]:
        path = _folder(run) / "spec.json"
        if not path.is_file():
            continue
        # As JSON: the field that has changed may be one that this version does not have.
        rows = recorded_differences(read_json(path), recorded(spec), part="trajectory")
        if rows:
            fields = "; ".join(f"{field}: {old!r} -> {new!r}" for field, old, new in rows)
            return f"; since {_name(run)} the trajectory has changed: {fields}"
    return ""


def set_baseline(folder: Path, *, reason: str | None) -> list[str]:
    """Make a run the explicit baseline of its trajectory; return what was done and undone.

    Raises:
        SpecError: The run is red and no reason is given, or it has no leg to compare with.
        LockstepError: MLflow does not have the run, or cannot be reached.
    """
    path = folder / "verdict.json"
    verdict = Verdict(read_json(path)["verdict"]) if path.is_file() else None
    if LEG not in legs(folder):
        raise SpecError(f"{folder.name} has no leg {LEG}, so nothing can be compared with it")
    if (verdict is None or not verdict.is_green) and not reason:
        raise SpecError(
            f"{folder.name} ended {verdict or 'without a verdict'}; a night that equals it would "
            "be called green. Say why it is right all the same: --reason 'TEXT'"
        )
    spec, device = read_spec(folder), device_of(folder)
    tracking.sync_quietly(folder)
    trajectory = trajectory_fingerprint(spec)
    own = _own(folder, spec)
    same = {
        "lockstep.kind": "run",
        "lockstep.trajectory_fingerprint": trajectory,
        DEVICE_TAG: device,
    }
    done = []
    for run in _runs(folder, spec, same):
        if BASELINE_TAG in run.tags and run.run_id != own.run_id:
            _change(folder, run, drop=(BASELINE_TAG, REASON_TAG))
            done.append(
                f"{_name(run)} is the baseline no more; it was since {run.tags[BASELINE_TAG]}"
            )
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    tags = {BASELINE_TAG: stamp, DEVICE_TAG: device, **({REASON_TAG: reason} if reason else {})}
    _change(folder, own, put=tags, drop=() if reason else (REASON_TAG,))
    return [
        *done,
        f"{folder.name} ({verdict or 'no verdict'}) is the baseline of trajectory {trajectory} on "
        f"{device}, instead of the last green night, until another is set or this one is unset",
    ]


def unset_baseline(folder: Path) -> list[str]:
    """Take the tag off a run; return what was undone.

    Raises:
        SpecError: The run is no explicit baseline.
    """
    own = _own(folder, read_spec(folder))
    if BASELINE_TAG not in own.tags:
        raise SpecError(
            f"{folder.name} is no explicit baseline; `lockstep baseline show` lists them"
        )
    _change(folder, own, drop=(BASELINE_TAG, REASON_TAG))
    return [f"{folder.name} is the baseline no more; nights compare with the last green night"]


def explicit_baselines(runs_dir: Path) -> list[FoundRun]:
    """Return all runs that carry the tag, in the experiments of the run folders in `runs_dir`."""
    folders = {
        _experiment(read_json(path)["recipe"]): path.parent for path in runs_dir.glob("*/spec.json")
    }
    found = [
        run
        for experiment, folder in sorted(folders.items())
        for run in find_runs(default_tracking_uri(folder), experiment, {"lockstep.kind": "run"})
    ]
    return [run for run in found if BASELINE_TAG in run.tags]


def has_environment(folder: Path) -> bool:
    """Whether leg a of a run came as far as its engines."""
    return (folder / LEG / "environment.json").is_file()


def device_of(folder: Path) -> str:
    """Return the device class that leg a of a run was computed on."""
    facts = read_json(folder / LEG / "environment.json")["trainer"]
    return device_class(read_spec(folder).execution.device, facts)


def _baseline(run: FoundRun, note: str, *, is_explicit: bool = False) -> Baseline:
    return Baseline(
        note=note,
        run_id=_name(run),
        folder=_folder(run),
        is_explicit=is_explicit,
        commit=_commit(run),
    )


def _commit(run: FoundRun) -> str | None:
    """Return the commit that a night ran at; the tag is of the checkout that first sent it."""
    path = _folder(run) / "verdict.json"
    night = (read_json(path).get("night") if path.is_file() else None) or {}
    commit: str | None = night.get("commit", run.tags.get("git.commit"))
    return commit


def _own(folder: Path, spec: RunSpec) -> FoundRun:
    found = _runs(folder, spec, {"lockstep.kind": "run", "lockstep.run_id": folder.name})
    if not found:
        uri = without_password(default_tracking_uri(folder))
        raise LockstepError(
            f"MLflow at {uri} has no run {folder.name}: was the server reached when it ran? Check "
            "MLFLOW_TRACKING_URI and try again"
        )
    return found[0]


def _runs(folder: Path, spec: RunSpec, tags: Mapping[str, str]) -> tuple[FoundRun, ...]:
    return find_runs(default_tracking_uri(folder), _experiment(spec.recipe), tags)


def _experiment(recipe: str) -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or recipe


def _name(run: FoundRun) -> str:
    return run.tags["lockstep.run_id"]


def _folder(run: FoundRun) -> Path:
    return Path(run.tags["lockstep.run_folder"])


def _has_ledger(run: FoundRun) -> bool:
    return (_folder(run) / LEG / "ledger.jsonl").is_file()


def _change(
    folder: Path, run: FoundRun, *, put: Mapping[str, str] | None = None, drop: tuple[str, ...] = ()
) -> None:
    """Put tags on a run of MLflow and take others off; its folder says whether it is a baseline."""
    prepare_environment()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    mark = _folder(run) / BASELINE_MARK
    try:
        client = MlflowClient(tracking_uri=default_tracking_uri(folder))
        for name, value in (put or {}).items():
            client.set_tag(run.run_id, name, value)
        for name in drop:
            if name in run.tags:
                client.delete_tag(run.run_id, name)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise LockstepError(
            f"MLflow did not take the tags of {_name(run)}: {without_password(str(error))}"
        ) from error
    if BASELINE_TAG in drop:
        mark.unlink(missing_ok=True)
    elif put:
        write_json(mark, dict(put))
