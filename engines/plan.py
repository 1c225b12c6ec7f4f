"""Where a run is cut into segments."""

from __future__ import annotations

from model_specs.run_spec import PlanSpec


def segment_stops(plan: PlanSpec, start: int) -> tuple[int, ...]:
    """Steps after `start` at which a checkpoint is due; the last step always is one."""
    return tuple(
        step
        for step in range(start + 1, plan.num_steps + 1)
        if step % plan.checkpoint_every == 0 or step == plan.num_steps
    )
