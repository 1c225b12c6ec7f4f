"""Where MLflow's store is, how long it is waited for, and reading runs back from it.

Without a tracking URI the store is a SQLite file beside all run folders of the same root, with the
artifacts next to it; `MLFLOW_TRACKING_URI` is honoured.

    nights = find_runs(uri, "tiny_cpu", {"lockstep.kind": "run", "lockstep.verdict": "Identical"})
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from model_specs.errors import LockstepError

NO_TAGS: Mapping[str, str] = MappingProxyType({})

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run as it was read from the store."""

    run_id: str
    experiment_id: str
    status: str
    started_ms: int
    """Milliseconds since the epoch."""
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    """Newest value of each metric."""


def default_tracking_uri(run_dir: Path) -> str:
    """Return `MLFLOW_TRACKING_URI`, or else the SQLite file beside all runs of the same root."""
    configured = os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"


def find_runs(
    tracking_uri: str, experiment: str | None, tags: Mapping[str, str] = NO_TAGS
) -> tuple[FoundRun, ...]:
    """Return the parent and child runs that carry all of `tags`, newest first.

    An experiment that does not exist has no runs; None searches all experiments.

    Raises:
        LockstepError: The store cannot be read.
    """
    prepare_environment()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        client = MlflowClient(tracking_uri=tracking_uri)
        if experiment is None:
            found = list(client.search_experiments())
        else:
            named = client.get_experiment_by_name(experiment)
            found = [] if named is None else [named]
        runs = [run for one in found for run in search(client, one.experiment_id, tags)]
        runs.sort(key=lambda run: run.info.start_time)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        where = without_password(f"{tracking_uri}: {error}")
        raise LockstepError(
            f"the runs of experiment {experiment!r} cannot be read from MLflow at {where}. Check "
            "MLFLOW_TRACKING_URI and the server"
        ) from error
    return tuple(
        FoundRun(
            run_id=run.info.run_id,
            experiment_id=run.info.experiment_id,
            status=run.info.status,
            started_ms=run.info.start_time,
            tags=dict(run.data.tags),
            params=dict(run.data.params),
            metrics=dict(run.data.metrics),
        )
        for run in reversed(runs)
    )


def search(client: Any, experiment_id: str, tags: Mapping[str, str]) -> list[Any]:
    """Return the runs that carry all tags, oldest first, page by page."""
    clauses = [f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items()]
    runs: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_runs(
            [experiment_id],
            filter_string=" AND ".join(clauses),
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        runs.extend(page)
        token = page.token
        if not token:
            return runs


def _quoted(value: str) -> str:
    if "'" not in value:
        return f"'{value}'"
    if '"' not in value:
        return f'"{value}"'
    raise LockstepError(
        f"MLflow cannot search for the tag value {value!r}, which has both kinds of quotes; "
        "use one kind"
    )


def prepare_environment() -> None:
    """Set what MLflow reads from the environment and the user has not: short waits above all."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow.store.db.utils"):  # a page of lines at first use
        logging.getLogger(name).setLevel(logging.WARNING)


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for another."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def local_artifacts(uri: str) -> str | None:
    """Return the artifact folder beside a SQLite file; a server has its own."""
    file = sqlite_file(uri)
    return None if file is None else (file.resolve().parent / "mlartifacts").as_uri()


_PASSWORD = re.compile(r"(//[^/\s:@]*):[^/\s]*@")


def without_password(text: str) -> str:
    """Return a URI, or a message that repeats one, as it may be shown."""
    return _PASSWORD.sub(r"\1:***@", text)


def ui_command(uri: str, experiment_id: str | None, run_id: str | None) -> str:
    """Return the shell command that shows the run: a server's page, or a server of the file."""
    page = run_page(uri, experiment_id, run_id)
    if page is not None:
        return f"python -m webbrowser {shlex.quote(page)}"
    return f"mlflow ui --backend-store-uri {shlex.quote(without_password(uri))}"


def run_page(uri: str, experiment_id: str | None, run_id: str | None) -> str | None:
    """Return the address of the run's page on a server; a SQLite file has none."""
    if not uri.startswith(("http://", "https://")):
        return None
    page = f"/#/experiments/{experiment_id}/runs/{run_id}" if run_id else ""
    return without_password(uri).rstrip("/") + page
