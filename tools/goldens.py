"""Goldens of the tiny recipe: ledgers and digests by environment, in `docs/ledgers/`.

    python -m tools.goldens check RUN            # 0 Identical, 10 Diverged, 3 not applicable
    python -m tools.goldens replace RUN --yes    # shows the difference first

Bits are promised for one environment, so a golden is kept by the smallest set of facts that decide
them (`engines.environment.bit_class`): machine, instruction set as torch and oneDNN dispatch on it,
torch, vLLM. Where a machine has none, the answer is `not applicable`, never green. Whatever else
differs is printed as a suspect when the bits do.

RUN is a run folder, or the name of one in `runs/`; its leg a is taken.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.environment import bit_class, without_ambient
from engines.provenance.diff import compare_ledgers
from engines.provenance.ledger import read_ledger
from engines.provenance.lock import read_lock
from engines.provenance.suspects import rank_suspects
from engines.provenance.verdict import Verdict
from engines.runs import open_run, read_spec, write_json
from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.json_text import read_json

LEDGERS = Path(__file__).resolve().parents[1] / "docs" / "ledgers"
RECIPE = "tiny_cpu"
NOT_APPLICABLE = 3
LEG = "a"
GOLDEN = "golden.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check found."""

    key: str
    verdict: Verdict | None
    """None: not applicable here."""
    message: str


def key_of(run: Path) -> str:
    """Return the class of the environment that the run was computed in."""
    environment = read_json(run / LEG / "environment.json")
    return bit_class(environment["trainer"])


def published() -> dict[str, Path]:
    """Return environment class -> folder of its golden."""
    return {path.parent.parent.name: path.parent for path in LEDGERS.glob(f"*/{RECIPE}/{GOLDEN}")}


def check(run: Path) -> Checked:
    """Compare a run with the golden of its environment class."""
    key = key_of(run)
    golden = published().get(key)
    if golden is None:
        known = ", ".join(sorted(published())) or "none"
        return Checked(
            key=key, verdict=None, message=f"not applicable: no golden of {key}; there are: {known}"
        )
    facts = read_json(golden / GOLDEN)
    trajectory = trajectory_fingerprint(read_spec(run / LEG))
    if facts["trajectory"] != trajectory:
        return Checked(
            key=key,
            verdict=Verdict.INCOMPARABLE,
            message=f"the golden is of trajectory {facts['trajectory']}, the run of {trajectory}; "
            "the recipe has changed, so its golden is replaced with it",
        )
    if not (golden / "ledger.jsonl").is_file():
        return _check_chain(key, facts, run)
    found = compare_ledgers(golden, run / LEG)
    suspects = rank_suspects(found.environment_differences)
    lines = [found.headline, *(f"suspect {n}: {s}" for n, s in enumerate(suspects, start=1))]
    message = lines[0] if found.verdict.is_green else "\n".join(lines)
    return Checked(key=key, verdict=found.verdict, message=message)


def _check_chain(key: str, facts: dict[str, Any], run: Path) -> Checked:
    """Compare the chain alone, where nothing else was published."""
    lines = read_ledger(run / LEG).lines
    chains = [line.chain for line in lines if line.step == facts["num_steps"]]
    found = chains[-1] if chains else f"none at step {facts['num_steps']}"
    equal = found == facts["chain"]
    return Checked(
        key=key,
        verdict=Verdict.IDENTICAL if equal else Verdict.DIVERGED,
        message=f"chain at step {facts['num_steps']}: golden {facts['chain']}, run {found}; only "
        "the chain of this environment was published, so the place is not known",
    )


def difference(run: Path) -> str:
    """Say what replacing the golden of the run's environment would change."""
    key, after = key_of(run), read_ledger(run / LEG)
    golden = published().get(key)
    if golden is None:
        return f"{key} has no golden yet; new: {after.last_step} steps, chain {after.chain}"
    facts, checked = read_json(golden / GOLDEN), check(run)
    verdict = checked.verdict or "not applicable"
    return (
        f"{key}: {facts['num_steps']} steps, chain {facts['chain']}\n"
        f"  becomes {after.last_step} steps, chain {after.chain}\n"
        f"  {verdict}: {checked.message}"
    )


def replace(run: Path) -> Path:
    """Write leg a of the run as the golden of its environment; return its folder.

    Raises:
        SpecError: The run is not green, or not of the tiny recipe.
    """
    details, spec = read_json(run / "verdict.json"), read_spec(run / LEG)
    if not Verdict(details["verdict"]).is_green or spec.recipe != RECIPE:
        raise SpecError(
            f"{run.name} is {details['verdict']} and of recipe {spec.recipe}; a golden is a green "
            f"run of {RECIPE}"
        )
    folder, leg = LEDGERS / key_of(run) / RECIPE, run / LEG
    ledger = read_ledger(leg)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_text(_ledger_text(leg / "ledger.jsonl"), encoding="utf-8")
    shutil.copytree(leg / "digests", folder / "digests")
    shutil.copy(leg / "spec.json", folder / "spec.json")
    environment = read_json(leg / "environment.json")
    write_json(folder / "environment.json", without_ambient(environment))
    stages = [
        {"stage": row.stage, "version": row.version, "outputs": dict(row.outputs)}
        for row in read_lock(leg)
        if row.outputs
    ]
    write_json(
        folder / GOLDEN,
        {
            "chain": ledger.chain,
            "num_steps": ledger.last_step,
            "trajectory": trajectory_fingerprint(spec),
            "stages": stages,
        },
    )
    return folder


def _ledger_text(path: Path) -> str:
    """The ledger under a name of its own and without its metrics, which hold seconds."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row["kind"] == "header":
            row["run_id"] = "golden"
        if "metrics" in row:
            row["metrics"] = {}
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def main() -> int:
    """Run one of the two commands; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "replace"))
    parser.add_argument("run")
    parser.add_argument("--yes", action="store_true", help="replace: write, after the difference")
    arguments = parser.parse_args()
    run = open_run(arguments.run, Path("runs"))
    if arguments.command == "check":
        checked = check(run)
        print(f"{checked.verdict or 'not applicable'} ({checked.key})\n{checked.message}")
        return NOT_APPLICABLE if checked.verdict is None else checked.verdict.exit_code
    print(difference(run))
    if not arguments.yes:
        print("nothing was written; say --yes to replace it")
        return 0
    print(f"written: {replace(run)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
