"""Make clean twin runs of the tiny recipe and count the red ones: the false-alarm rate.

    python -m tools.false_alarms [--runs 20] [--steps 3] [--out FOLDER]

Run i is the tiny recipe with root seed 1000 + i, as two legs of a few steps from the initial
weights: leg a in one session, leg b in another with engines of its own that are started afresh and
are given their requests in another order. A run is green when both legs are Aligned over their
window, every push arrived, both ledgers verify from their side files, and the two are Identical.
Exit code 1 when one is red.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.contracts import ArtifactRef
from engines.gates.logprobs import LogprobGate
from engines.loop import initial_push, steps
from engines.provenance.diff import compare_ledgers
from engines.provenance.ledger import LedgerHeader, LedgerWriter
from engines.provenance.verdict import Verdict
from engines.runs import new_run, write_spec
from flows.cli import prepare_process
from model_specs.errors import LockstepError
from model_specs.fingerprint import plan_fingerprint, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from tasks import convert, download, gates, train
from tasks.session import LegSession, leg_session

FIRST_SEED = 1000
OTHER_ORDER = "execution.request_order_seed=7"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One leg of one run."""

    folder: str
    verdict: str
    reason: str
    num_tokens: int
    max_abs_diff: float


def run_leg(opened: LegSession, folder: Path, weights: ArtifactRef, *, seed: int, num: int) -> Leg:
    """Train some steps from the initial weights with this root seed, into a ledger of its own."""
    trainer, rollout, prompts = opened.engines()
    spec = apply_overrides(opened.spec, (f"seeds.root={seed}", f"plan.num_steps={num}"))
    trainer.load(weights.uri)
    folder.mkdir(parents=True)
    write_spec(folder, spec)
    ledger = LedgerWriter(
        folder,
        header=LedgerHeader(
            run_id=f"seed-{seed}",
            leg=folder.name,
            trajectory=trajectory_fingerprint(spec),
            plan=plan_fingerprint(spec),
        ),
    )
    outcomes = [initial_push(trainer, rollout)]
    ledger.append(outcomes[0].record, outcomes[0].values)
    for outcome in steps(trainer, rollout, spec, prompts, start=0, stop=num, commit=ledger.commit):
        ledger.append(outcome.record, outcome.values)
        outcomes.append(outcome)
    gate = LogprobGate()
    for outcome in outcomes:
        if outcome.gate is not None:
            gate.add(outcome.gate)
    result = gate.final(
        groups_with_variance=sum(o.groups_with_variance for o in outcomes),
        max_grad_norm=max(o.record.metrics.get("train/grad_norm", 0.0) for o in outcomes),
        changed_weights=sum(o.changed_weights for o in outcomes),
    )
    unequal = [text for o in outcomes for text in o.record.violations]
    return Leg(
        folder=str(folder),
        verdict=str(Verdict.MISALIGNED if unequal else result.verdict),
        reason=unequal[0] if unequal else result.reason,
        num_tokens=result.num_tokens,
        max_abs_diff=result.max_abs_diff,
    )


def run_legs(out: Path, leg: str, *, runs: int, num_steps: int) -> list[Leg]:
    """One leg of every run, in one session."""
    overrides = ("plan.keep_tensor_steps=0", *((OTHER_ORDER,) if leg == "b" else ()))
    spec = apply_overrides(load_recipe("tiny_cpu"), overrides)
    run = new_run(spec, out, run_id=f"session-{leg}")
    with leg_session(spec, run_dir=run.folder, leg=leg, fence=run.fence) as opened:
        inputs = download.download.fn(opened.name)
        weights = convert.convert.fn(opened.name, inputs.model)
        train.start_engines.fn(opened.name, inputs.model, inputs.data, weights)
        preflight = gates.preflight.fn(opened.name)
        print(f"session {leg}: preflight {preflight['verdict']}, {opened.processes}", flush=True)
        return [
            run_leg(opened, out / f"run-{i:02d}" / leg, weights, seed=FIRST_SEED + i, num=num_steps)
            for i in range(runs)
        ]


def judge(pair: tuple[Leg, Leg]) -> tuple[bool, str]:
    """Whether a run is green, and what was found."""
    for leg in pair:
        if leg.verdict != Verdict.ALIGNED:
            return False, f"{leg.folder}: {leg.verdict}: {leg.reason}"
    try:
        found = compare_ledgers(pair[0].folder, pair[1].folder, verify=True)
    except LockstepError as error:
        return False, str(error)
    return found.verdict is Verdict.IDENTICAL, f"{found.verdict}: {found.headline}"


def main() -> None:
    """Make the runs and print one line a run and the count of red ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="a new folder for the ledgers")
    asked = parser.parse_args()
    prepare_process(as_json=True)
    out = (asked.out or Path(tempfile.mkdtemp(prefix="false-alarms-"))).resolve()
    began = time.monotonic()
    legs = [run_legs(out, leg, runs=asked.runs, num_steps=asked.steps) for leg in ("a", "b")]
    red, rows = 0, []
    for index, pair in enumerate(zip(*legs, strict=True)):
        green, said = judge(pair)
        red += not green
        rows.append({"run": index, "green": green, "said": said, "legs": [asdict(p) for p in pair]})
        tokens = sum(leg.num_tokens for leg in pair)
        print(f"run {index:02d} {'green' if green else 'RED'} {tokens} tokens at 0.0; {said}")
    (out / "false_alarms.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    seconds = time.monotonic() - began
    print(f"{red} of {asked.runs} clean runs are red; {seconds:.0f} s; {out}/false_alarms.json")
    sys.exit(1 if red else 0)


if __name__ == "__main__":
    main()
