"""How a flow ends: verdict, MLflow, report, and a final state named by the verdict.

A red verdict is an outcome, not a failure of the machinery. Prefect's engine raises what a failed
state holds, logs it with its traceback and calls it unexpected: for a `RedVerdictError` those
records are dropped, and the line that names the final state says it all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.states import Completed, Failed, State

from engines.provenance.diff import Comparison
from engines.provenance.verdict import Verdict
from engines.runs import Run
from model_specs.errors import LockstepError
from tasks import compare, tracking
from tasks.report import publish

logger = logging.getLogger(__name__)


class RedVerdictError(LockstepError):
    """A flow has ended, and its verdict is not green.

    Attributes:
        details: What was written to verdict.json, or the comparison.
    """

    def __init__(self, message: str, *, details: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.details = details


def final_state(verdict: Verdict, *, headline: str, details: Mapping[str, Any]) -> State:
    """Return the state that a flow ends in; its type is COMPLETED only for Identical and Aligned.

    The data of a red state is a `RedVerdictError` with the details, since Prefect wants an
    exception there.
    """
    if verdict.is_green:
        return Completed(name=str(verdict), message=headline, data=dict(details))
    error = RedVerdictError(f"{verdict}: {headline}", details=dict(details))
    return Failed(name=str(verdict), message=headline, data=error)


def conclude(
    run: Run,
    legs: Sequence[compare.LegResult],
    comparison: Comparison | None = None,
    *,
    more: Mapping[str, Any] | None = None,
    found: Mapping[str, Path] | None = None,
) -> State:
    """Put the outcome together, show it everywhere, and return it as the flow's final state.

    `found` are the legs of the report by name, where the first two of the run are not what was
    compared. `more` stands beside the figures in verdict.json, and its `about` in front of the
    headline.
    """
    tracked = tracking.sync_quietly(run.folder)
    command = tracked.ui_command if tracked else None
    outcome = compare.conclude(run, legs, comparison, mlflow_command=command, more=more)
    try:
        publish(run.folder, outcome, found=found, mlflow_page=tracked.page if tracked else None)
    except Exception:  # the verdict is written, and stands without its pages
        logger.exception("the pages of %s could not be made", run.folder)
    tracking.sync_quietly(run.folder)
    return final_state(outcome.verdict, headline=outcome.headline, details=outcome.details)


class _WithoutExpectedVerdicts(logging.Filter):
    """Drops the records of Prefect's engine that report a `RedVerdictError` as unexpected."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for those alone."""
        return not (record.exc_info and isinstance(record.exc_info[1], RedVerdictError))


for _name in ("prefect.engine", "prefect.flow_runs"):
    logging.getLogger(_name).addFilter(_WithoutExpectedVerdicts())
