"""Run the step at which two legs part again, on both sides, with its tensors kept.

python -m flows.reproduce RUN_A RUN_B

What a ledger holds of a step are digests. A step is a function of the checkpoint before it, so the
element and both values can be had afterwards, at the cost of the steps since that checkpoint. Each
replay is compared with the record of its own side first: a record that its own spec does not give
again is a finding of its own, since what made it (a fault, another machine, another library) is not
in the spec.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import State

from engines import runs
from engines.provenance.diff import Comparison, compare_ledgers
from engines.provenance.ledger import read_ledger
from engines.provenance.side_files import tensors_path
from engines.provenance.verdict import Verdict
from flows.conclusion import final_state
from flows.legs import segment_leg
from model_specs.errors import ArtifactError, SpecError
from model_specs.run_spec import RunSpec
from tasks.sides import Side, open_sides

logger = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One side's step, run again."""

    side: str
    """`a` or `b`."""
    label: str
    """`RUN/LEG`."""
    start_step: int
    """Step of the checkpoint that it began with; 0 for the initial weights."""
    folder: Path
    """The scratch leg."""
    against_record: Comparison
    """The side's record and its replay, up to the step."""

    @property
    def reproduces(self) -> bool:
        """Whether the record came out again."""
        return self.against_record.verdict is Verdict.IDENTICAL

    def __str__(self) -> str:
        """Say in one line what came of it."""
        begun = f"from the checkpoint of step {self.start_step}" if self.start_step else "from 0"
        found = self.against_record
        if self.reproduces:
            return f"{self.side} ({self.label}) was run again {begun} and reproduces its record"
        return (
            f"{self.side} ({self.label}) was run again {begun} and does NOT reproduce its record: "
            f"they part at {found.first.place if found.first else found.headline}, so this spec in "
            "this environment does not give what was recorded"
        )


@flow(name="reproduce", flow_run_name="reproduce-{run_a}-{run_b}")
def reproduce(
    run_a: str, run_b: str, across: tuple[str, ...] = (), runs_dir: str = "runs"
) -> State:
    """Compare two legs, and run the step of their first difference again on both sides.

    Args:
        run_a: Run name, run folder, RUN/LEG, or `mlflow:ID`.
        run_b: The same for the other side.
        across: Spec fields that are expected to differ.
        runs_dir: Folder that holds run folders.
    """
    with open_sides((run_a, run_b), Path(runs_dir)) as sides:
        if sides[0].kind != "leg":
            raise SpecError(f"{run_a} is a {sides[0].kind}: only a step of a leg can be run again")
        found = compare_ledgers(sides[0].path, sides[1].path, across=across)
        if found.first is None:
            return final_state(found.verdict, headline=found.headline, details=found.to_dict())
        replays = [
            replay(side, name, found.first.step) for side, name in zip(sides, "ab", strict=True)
        ]
        element = between(sides, replays, found, across)
        agree = compare_ledgers(*(again.folder for again in replays), across=across)
        details = outcome(found, replays, element, agree)
        return final_state(found.verdict, headline=str(details["headline"]), details=details)


def replay(side: Side, name: str, step: int) -> Replay:
    """Run the steps from the nearest checkpoint to `step` again, in fresh engines.

    Raises:
        SpecError: The difference lies in the state that the leg begins with.
        ArtifactError: The leg's folder is not here, or the replay failed.
    """
    leg = side.path
    if not (leg / "digests").is_dir():
        raise ArtifactError(
            f"{side.label}: its run folder is not here, so no step can be run again"
        )
    begun = read_ledger(leg).header.start_step
    if step <= begun:
        raise SpecError(
            f"{side.label} differs in the state that it begins with: no step of its own made it; "
            f"`lockstep diff A@{begun} B@{begun}` compares the two states"
        )
    start_step, start = runs.checkpoint_before(leg, step)
    if start_step < begun:
        raise ArtifactError(
            f"{side.label} has no checkpoint any more from which to run step {step}"
        )
    spec = spec_for(leg, step)
    scratch = runs.new_run(
        spec,
        leg.parent / "reproduce",
        run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{leg.name}-step-{step}-{name}",
    )
    logger.info("%s: steps %d to %d of %s again", name, start_step + 1, step, side.label)
    result = segment_leg(spec, scratch, start, start_step=start_step, to_step=step)
    if not result.chain_digest:  # empty where the leg failed
        raise ArtifactError(f"{side.label}: step {step} could not be run again: {result.reason}")
    return Replay(
        side=name,
        label=side.label,
        start_step=start_step,
        folder=scratch.folder / "a",
        against_record=compare_ledgers(leg, scratch.folder / "a"),
    )


def spec_for(leg: Path, step: int) -> RunSpec:
    """The leg's own spec with a plan that ends with `step` and keeps its tensors.

    Raises:
        SpecError: The leg began after `step`.
    """
    spec = runs.read_spec(leg if (leg / "spec.json").is_file() else leg.parent)
    plan = {**spec.plan.model_dump(), "num_steps": step, "keep_tensor_steps": 1}
    return RunSpec.model_validate({**spec.model_dump(), "plan": plan})


def between(
    sides: Sequence[Side], replays: Sequence[Replay], found: Comparison, across: tuple[str, ...]
) -> Comparison | None:
    """Compare what is known of both sides: their kept tensors, or those of a true replay.

    None where a side has neither: then only its digests are known.
    """
    assert found.first is not None
    first = found.first
    evidence = []
    for side, again in zip(sides, replays, strict=True):
        if tensors_path(side.path, first.step, first.update, first.probe).is_file():
            evidence.append(side.path)
        elif again.reproduces:
            evidence.append(again.folder)
        else:
            return None
    return compare_ledgers(*evidence, across=across)


def outcome(
    found: Comparison,
    replays: Sequence[Replay],
    element: Comparison | None,
    replays_agree: Comparison,
) -> Mapping[str, Any]:
    """Put together what is printed and returned; the verdict is that of the records."""
    exact = element if element is not None and element.first is not None else found
    true = [again.side for again in replays if again.reproduces]
    agree = replays_agree.verdict is Verdict.IDENTICAL
    said = {
        2: "both sides reproduce their records",
        1: f"only {' '.join(true)} reproduces its record",
        0: "neither side reproduces its record",
    }[len(true)]
    return {
        **found.to_dict(),
        "first": exact.to_dict()["first"],
        "headline": f"{exact.headline}; {said}"
        + ("; both replays are the same bits, so what went in does not explain it" * agree),
        "replays_agree": agree,
        "replays": [
            {
                "side": again.side,
                "label": again.label,
                "start_step": again.start_step,
                "folder": str(again.folder),
                "reproduces": again.reproduces,
                "summary": str(again),
                "against_record": again.against_record.to_dict(),
            }
            for again in replays
        ],
    }


if __name__ == "__main__":
    reproduce(sys.argv[1], sys.argv[2])
