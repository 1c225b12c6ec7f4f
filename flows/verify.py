"""Run one checkpoint interval of a run again and compare it with the run's ledger.

python -m flows.verify RUN SEGMENT
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from engines.plan import segment_bounds
from engines.provenance.ledger import Ledger, read_ledger
from flows.conclusion import conclude
from flows.legs import segment_leg
from flows.run_request import VerifyRequest, run_name
from model_specs.run_spec import RunSpec
from tasks import compare

logger = logging.getLogger("lockstep")


@flow(name="verify", flow_run_name=run_name)
def verify(request: VerifyRequest, runs_dir: str = "runs") -> State:
    """Compute a segment again in fresh engines; `Identical`, or `Diverged` at the first difference.

    Evidence for a run that one can afford only once: segment K is the steps from checkpoint K-1 to
    checkpoint K, and what it costs is stated. Nothing of the run itself is changed; the scratch leg
    lies in `RUN/verify/`.

    Args:
        request: Run, leg, and number of the checkpoint interval.
        runs_dir: Folder that holds run folders.
    """
    began = time.monotonic()
    segment, leg = request.segment, request.leg
    folder = runs.open_run(request.run, Path(runs_dir))
    spec = runs.read_spec(folder)
    ledger = read_ledger(folder / leg)
    start_step, to_step = segment_bounds(
        spec.plan,
        segment=segment,
        start_step=ledger.header.start_step,
        last_step=ledger.last_step,
    )
    start = runs.checkpoint_at(folder / leg, start_step)[1] if start_step else None
    seconds, share = segment_cost(ledger, start_step, to_step)
    about = f"segment {segment} (steps {start_step + 1} to {to_step})"
    logger.info("%s took the run %.1f s, %.0f%% of its steps' time", about, seconds, 100 * share)
    scratch = runs.new_run(
        spec, folder / "verify", run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-segment-{segment}"
    )
    result = segment_leg(
        own_inputs(spec, folder / leg), scratch, start, start_step=start_step, to_step=to_step
    )
    comparison = None
    if result.chain_digest:  # empty where the leg failed
        comparison = compare.compare_folders(folder / leg, scratch.folder / "a", verify=True)
    cost = {
        "seconds": round(time.monotonic() - began, 3),
        "segment_seconds_in_run": round(seconds, 3),
        "share_of_run": round(share, 4),
        "steps": to_step - start_step,
    }
    about += f", cost {cost['seconds']:.1f} s for {share:.0%} of the run"
    return conclude(
        scratch, (result,), comparison, more={"about": about, "segment": segment, "cost": cost}
    )


def own_inputs(spec: RunSpec, leg_folder: Path) -> RunSpec:
    """Return the spec with model and data read from the leg's own copies, where they are there.

    The place they came from may be gone. What the copies hold is compared with the digests of the
    spec, as any source is.
    """
    changes = {
        name: part.model_copy(update={field: str((leg_folder / name).resolve())})
        for name, field, part in (("model", "path", spec.model), ("data", "source", spec.data))
        if (leg_folder / name).is_dir()
    }
    return spec.model_copy(update=changes)


def segment_cost(ledger: Ledger, start_step: int, to_step: int) -> tuple[float, float]:
    """Return the seconds that the segment's steps took in the run, and their share of all steps."""
    by_step: dict[int, float] = {}
    for line in ledger.lines:
        if line.update >= 0:  # of several updates the last one has the whole step's seconds
            by_step[line.step] = line.metrics.get("perf/step_s", 0.0)
    inside = sum(seconds for step, seconds in by_step.items() if start_step < step <= to_step)
    total = sum(by_step.values())
    return inside, inside / total if total else 0.0


if __name__ == "__main__":
    verify(VerifyRequest(run=sys.argv[1], segment=int(sys.argv[2])))
