"""Run a locked pipeline again, and name the stage whose output is not what the lock says.

python -m flows.verify_lock LOCK
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from engines.plan import with_log_prob_gate_alone
from engines.provenance.ledger import LEDGER_FILE
from engines.provenance.lock import LOCK_FILE, LockRow, StageOutput, compare_outputs, read_lock
from engines.provenance.verdict import Verdict, worst
from flows.conclusion import conclude
from flows.legs import run_leg
from flows.run_request import VerifyLockRequest, run_name
from model_specs.errors import ArtifactError
from model_specs.run_spec import RunSpec
from tasks import artifacts, compare
from tasks.compare import LegResult

logger = logging.getLogger("lockstep")


@flow(name="verify-lock", flow_run_name=run_name)
def verify_lock(request: VerifyLockRequest, runs_dir: str = "runs") -> State:
    """Run every locked stage again from the lock's inputs; name the stages whose output differs.

    First the digests of the artifacts that are still there are computed again, then the pipeline
    runs from its sources in fresh engines. `Identical`, or `Diverged` with both digests. Nothing
    of the run is changed; the scratch leg lies in `RUN/verify/`, or in the runs folder for a lock
    that has no run.

    Args:
        request: Run and leg, or a `lock.json` with its `spec.json` beside it.
        runs_dir: Folder that holds run folders.
    """
    source = locked_leg(request.lock, request.leg, Path(runs_dir))
    spec = without_gates(runs.read_spec(source))
    has_run = (source.parent / "run.json").is_file()
    scratch = runs.new_run(
        spec,
        source.parent / "verify" if has_run else Path(runs_dir),
        run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-lock",
    )
    in_place: list[StageOutput] = []
    try:
        result = run_leg(
            spec,
            scratch,
            "a",
            before_steps=lambda name: in_place.extend(artifacts.check_artifacts(name, source)),
        )
    except ArtifactError as error:  # an input is not the one that was locked
        result = LegResult.failed("a", str(error), verdict=Verdict.DIVERGED)
    again = compare_outputs(read_lock(source), made_rows(scratch.folder / "a"))
    outputs = [*in_place, *again]
    comparison = None
    if result.chain_digest and (source / LEDGER_FILE).is_file():
        comparison = compare.compare_folders(source, scratch.folder / "a")
    result = judged(result, outputs)
    rows = [
        {"how": how, **asdict(output), "equal": output.is_equal}
        for how, found in (("kept", in_place), ("again", again))
        for output in found
    ]
    more = {"about": f"lock of {source}", "stages": rows}
    return conclude(scratch, (result,), comparison, more=more)


def locked_leg(lock: str, leg: str, runs_dir: Path) -> Path:
    """Return the folder that holds the lock and its spec.

    Raises:
        SpecError: There is no such run or leg.
        ArtifactError: There is no lock, or no spec beside it.
    """
    path = Path(lock)
    folder = path.parent if path.name == LOCK_FILE else path
    if not (folder / LOCK_FILE).is_file():
        folder = runs.open_run(lock, runs_dir) / leg
    read_lock(folder)
    if not (folder / "spec.json").is_file():
        raise ArtifactError(f"{folder} has no spec.json beside its lock, so nothing can be run")
    return folder.resolve()


def without_gates(spec: RunSpec) -> RunSpec:
    """The spec of a scratch leg: its stages are compared, and its own gates were judged."""
    return spec.model_copy(update={"plan": with_log_prob_gate_alone(spec.plan)})


def made_rows(folder: Path) -> tuple[LockRow, ...]:
    """The rows of the scratch leg; none where it failed before its first stage ended."""
    return read_lock(folder) if (folder / LOCK_FILE).is_file() else ()


def judged(result: LegResult, outputs: Sequence[StageOutput]) -> LegResult:
    """Return the result with the verdict of its stages; each that differs is named once.

    A stage that was not reached after a failure says nothing by itself; the first of them failed.
    """
    if not outputs:
        return replace(result, verdict=Verdict.VACUOUS, reason="the lock has no output to compare")
    differing = [output for output in outputs if output.found is not None and not output.is_equal]
    unreached = [output for output in outputs if output.found is None]
    named = [str(output) for output in differing]
    if unreached and not result.chain_digest:
        named.append(f"stage {unreached[0].stage} failed: {result.reason}")
    elif unreached:
        named.append(f"stage {unreached[0].stage} was not run again; it is in the lock alone")
    if not named:
        return replace(result, reason=f"{len(outputs)} outputs of stages equal; {result.reason}")
    for text in named:
        logger.error("%s", text)
    verdict = worst([result.verdict, Verdict.DIVERGED])
    return replace(result, verdict=verdict, reason="; ".join(named))


if __name__ == "__main__":
    verify_lock(VerifyLockRequest(lock=sys.argv[1]))
