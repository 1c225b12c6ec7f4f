"""Where a run is cut into segments, and what of its plan a leg that repeats it keeps."""

from __future__ import annotations

from model_specs.errors import SpecError
from model_specs.run_spec import GatePlan, PlanSpec


def segment_stops(plan: PlanSpec, start: int) -> tuple[int, ...]:
    """Steps after `start` at which a checkpoint is due; the last step always is one."""
    return tuple(
        step
        for step in range(start + 1, plan.num_steps + 1)
        if step % plan.checkpoint_every == 0 or step == plan.num_steps
    )


def segment_bounds(
    plan: PlanSpec, *, segment: int, start_step: int, last_step: int
) -> tuple[int, int]:
    """Return the step that a segment (from 1) begins after, and its last step.

    Args:
        plan: Plan of the run.
        segment: Number of the checkpoint interval.
        start_step: Step that the run begins after.
        last_step: How far the run has come; a segment that it has not finished does not count.

    Raises:
        SpecError: There is no such segment.
    """
    stops = [step for step in segment_stops(plan, start_step) if step <= last_step]
    if not 1 <= segment <= len(stops):
        raise SpecError(
            f"segment {segment}: the run has {len(stops)} finished segments, which end with steps "
            f"{stops}"
        )
    return [start_step, *stops][segment - 1], stops[segment - 1]


def with_middle_checkpoint(plan: PlanSpec) -> tuple[PlanSpec, int]:
    """Return the plan with a checkpoint near its middle that is still there at its end, and where.

    A checkpoint that is due anyway is taken, the nearest to the middle; else the plan is given one.

    Raises:
        SpecError: A run of one step has no middle.
    """
    if plan.num_steps < 2:
        raise SpecError(
            f"plan.num_steps={plan.num_steps}: a nightly resumes from a checkpoint in the middle, "
            "so it needs at least 2 steps"
        )
    stops = segment_stops(plan, 0)[:-1]
    if not stops:
        plan = plan.model_copy(update={"checkpoint_every": plan.num_steps // 2})
        stops = segment_stops(plan, 0)[:-1]
    middle = min(stops, key=lambda step: (abs(2 * step - plan.num_steps), step))
    if plan.keep_last is not None:
        after = sum(stop >= middle for stop in (*stops, plan.num_steps))
        plan = plan.model_copy(update={"keep_last": max(plan.keep_last, after)})
    return plan, middle


def with_log_prob_gate_alone(plan: PlanSpec) -> PlanSpec:
    """Return the plan of a leg that repeats another, whose preflight and controls were judged."""
    gates = GatePlan(preflight="off", layerwise="off", controls="off", logprobs=plan.gates.logprobs)
    return plan.model_copy(update={"gates": gates})
