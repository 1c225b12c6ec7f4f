"""How a flow ends: verdict, MLflow, report, and a final state named by the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.states import Completed, Failed, State

from engines.provenance.diff import Comparison
from engines.runs import Run
from tasks import compare, tracking
from tasks.report import publish


def conclude(
    run: Run,
    legs: Sequence[compare.LegResult],
    comparison: Comparison | None = None,
    *,
    more: Mapping[str, Any] | None = None,
) -> State:
    """Put the outcome together, show it everywhere, and return it as the flow's final state.

    The state's type is COMPLETED only for Identical and Aligned. `more` stands beside the figures
    in verdict.json, and its `about` in front of the headline.
    """
    tracked = tracking.sync_quietly(run.folder)
    command = tracked.ui_command if tracked else None
    outcome = compare.conclude(run, legs, comparison, mlflow_command=command, more=more)
    publish(run.folder, outcome)
    tracking.sync_quietly(run.folder)
    make = Completed if outcome.verdict.is_green else Failed
    return make(name=str(outcome.verdict), message=outcome.headline, data=dict(outcome.details))
