"""How far a leg is, as a Prefect artifact that is updated in place: `progress-a`, `progress-b`.

For looking only: a server that does not answer costs a warning, never the run. Outside of a flow
run nothing is written.

    show_progress(opened, step=3)
"""

from __future__ import annotations

import logging
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext

from tasks.session import LegSession

logger = logging.getLogger(__name__)


def show_progress(opened: LegSession, *, step: int) -> None:
    """Set the leg's progress to `step` of the plan's steps, in percent."""
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        return
    steps = opened.spec.plan.num_steps
    percent = 100.0 * step / steps
    text = f"leg {opened.leg}: step {step} of {steps}"
    try:
        if opened.progress_artifact is None:
            created = create_progress_artifact(
                key=f"progress-{opened.leg}", progress=percent, description=text
            )
            assert isinstance(created, UUID)  # here, outside of an event loop
            opened.progress_artifact = created
        else:
            update_progress_artifact(opened.progress_artifact, progress=percent, description=text)
    except Exception as error:  # what is for looking must never end a run
        logger.warning("the progress of %s was not shown in Prefect: %s", opened.leg, error)
