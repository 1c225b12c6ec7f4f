"""The run folders of one root, as MLflow would show them, and which of them it does not have.

The run folder is the record, so what nights are found by is there too, for the night whose server
is down. A folder that was sent as a whole holds a mark, so that hundreds are looked through fast.

    runs_on_disk(Path("runs"))       # runs with the tags that the store would have, newest first
    unsent_folders(Path("runs"))     # those with a verdict that a store does not have yet
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.provenance.fence import write_durably
from engines.provenance.ledger import LEDGER_FILE
from model_specs.errors import ArtifactError
from model_specs.json_text import read_json
from tasks.tracked_folder import file_digest, run_status, started_ms, verdict_tags
from tasks.tracking_store import FoundRun, default_tracking_uri, without_password

logger = logging.getLogger(__name__)

SENT_MARK = "mlflow.json"
"""In a run folder: the store that has it as a whole, and the digest of the verdict it was sent
with."""
BASELINE_MARK = "baseline.json"
"""In a run folder that is an explicit baseline: the tags that say so."""


def mark_sent(folder: Path, uri: str, verdict: str | None) -> None:
    """Note that a store has all of a run; `verdict` is the digest of its verdict.json."""
    mark = {"uri": without_password(uri), "verdict": verdict}
    path = folder / SENT_MARK
    if verdict is not None and _object(path) != mark:
        write_durably(path, (json.dumps(mark, sort_keys=True) + "\n").encode())


def verdict_digest(folder: Path) -> str | None:
    """Return the digest of verdict.json; None before there is one."""
    path = folder / "verdict.json"
    return file_digest(path) if path.is_file() else None


def unsent_folders(runs_dir: Path) -> list[Path]:
    """Return the run folders whose verdict their store does not have, newest first."""
    found = []
    for path in runs_dir.glob("*/verdict.json"):
        folder = path.parent
        sent = {
            "uri": without_password(default_tracking_uri(folder)),
            "verdict": verdict_digest(folder),
        }
        if (folder / "run.json").is_file() and _object(folder / SENT_MARK) != sent:
            found.append(folder)
    return sorted(found, key=started_ms, reverse=True)


def runs_on_disk(runs_dir: Path) -> list[FoundRun]:
    """Return the nights and explicit baselines in a folder of runs, newest first.

    With the tags that nights are found by. A folder that cannot be read is named in the log.
    """
    found = []
    for path in runs_dir.glob("*/verdict.json"):
        try:
            run = _run_on_disk(path.parent)
        except (OSError, ArtifactError, KeyError) as error:
            logger.warning("%s is left out: %s", path.parent, error)
            continue
        if run is not None:
            found.append(run)
    return sorted(found, key=lambda run: run.started_ms, reverse=True)


def _run_on_disk(folder: Path) -> FoundRun | None:
    verdict = read_json(folder / "verdict.json")
    baseline = _object(folder / BASELINE_MARK)
    night = verdict.get("night")
    if not night and not baseline:
        return None
    trajectory = _trajectory(folder / "a" / LEDGER_FILE)
    tags = {
        "lockstep.kind": str(verdict.get("kind", "run")),
        "lockstep.run_id": folder.name,
        "lockstep.run_folder": str(folder.resolve()),
        "lockstep.recipe": str(read_json(folder / "spec.json")["recipe"]),
        **({"lockstep.trajectory_fingerprint": trajectory} if trajectory else {}),
        **({"git.commit": night["commit"]} if night and night.get("commit") else {}),
        **verdict_tags(verdict),
        **baseline,
    }
    return FoundRun(
        run_id="",
        experiment_id="",
        status=run_status(verdict),
        started_ms=started_ms(folder),
        tags=tags,
        params={},
        metrics={},
    )


def _trajectory(ledger: Path) -> str | None:
    """Return the fingerprint in a ledger's header, without reading its lines."""
    if not ledger.is_file():
        return None
    with ledger.open("rb") as file:
        first = file.readline()
    try:
        return str(json.loads(first)["trajectory"])
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{ledger}: line 1 is not a ledger's header: {error}") from error


def _object(path: Path) -> Mapping[str, Any]:
    """Return the object of a JSON file; {} where there is none, or it is not one."""
    try:
        return read_json(path)
    except ArtifactError:
        return {}
