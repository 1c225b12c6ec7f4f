"""Is anything learned, and only from the reward: three seeds, exact, shuffled and stock.

    python3 -m tools.learning --runs-dir DIR [--device cpu] [--steps 100] [--seeds 1 2 3]
        [--beside 1] [--limit-s 900] [--out OUT.json]

Runs `tiny_cpu` as `KIND-SEED` for every kind and seed that is not in DIR yet, `--beside` at a time,
then judges by the criterion of docs/measurements/2026-11-29-learning-tiny.md, which was written
before any run: the mean reward of the last 20 steps is above the recipe's LEARNING_THRESHOLD in
every exact run and below it in every shuffled one; stock's mean over seeds is within the largest
difference of two seeds of the same numerics.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from model_specs.recipes.tiny_cpu import LEARNING_THRESHOLD

LAST_STEPS = 20
KINDS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "shuffled": ("loss.advantage_transform=shuffled",),
    "stock": (
        "numerics.policy=stock", "plan.gates.logprobs=report", "plan.gates.preflight=off",
        "plan.gates.layerwise=off",
    ),
}  # fmt: skip


def main() -> None:
    """Run what is missing, judge, print and write; exit code 1 where the criterion is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--beside", type=int, default=1)
    parser.add_argument("--limit-s", type=int, default=900)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    wanted = list(itertools.product(KINDS, options.seeds))
    with ThreadPoolExecutor(options.beside) as pool:
        for name, code in pool.map(lambda pair: run(*pair, options, deadline), wanted):
            print(f"{name}: rc {code}", flush=True)
    found = judge(options.runs_dir, options.seeds, options.steps)
    print(json.dumps(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    raise SystemExit(0 if found["learns"] and found["shuffled_does_not"] else 1)


def run(
    kind: str, seed: int, options: argparse.Namespace, deadline: float
) -> tuple[str, int | str]:
    """Run one, unless it is there; return its name and exit code."""
    name = f"{kind}-{seed}"
    if len(rewards(options.runs_dir, name)) >= options.steps:
        return name, "was there"
    # Databases of their own: they run beside each other.
    folder = options.runs_dir / f"of-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    changes = (
        f"seeds.root={seed}", f"plan.num_steps={options.steps}",
        f"plan.checkpoint_every={options.steps}", "plan.keep_tensor_steps=0",
        "plan.gates.controls=off", f"execution.device={options.device}",
        "execution.gpu_is_shared=true", *KINDS[kind],
    )  # fmt: skip
    command = [sys.executable, "-m", "flows.cli", "run", "tiny_cpu", "--runs-dir", str(folder)]
    command += ["--run-id", name, *(part for change in changes for part in ("--set", change))]
    env = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    with (folder / "log").open("w") as log:
        try:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=env,
                timeout=max(1.0, deadline - time.monotonic()), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return name, "over the limit"
    return name, done.returncode


def rewards(runs_dir: Path, name: str) -> list[float]:
    """Return the mean reward of every step of a run; empty where there is none."""
    for folder in (runs_dir / f"of-{name}" / name, runs_dir / name):
        path = folder / "a" / "metrics.jsonl"
        if path.is_file():
            rows = [json.loads(line)["metrics"] for line in path.read_text().splitlines()]
            return [row["reward/mean"] for row in rows if "reward/mean" in row]
    return []


def judge(runs_dir: Path, seeds: list[int], steps: int) -> dict[str, Any]:
    """Hold what was run against the criterion; a run that is missing or short fails it."""
    last: dict[str, dict[int, float | None]] = {}
    curves: dict[str, list[float]] = {}
    for kind, seed in itertools.product(KINDS, seeds):
        found = rewards(runs_dir, f"{kind}-{seed}")
        is_whole = len(found) >= steps
        last.setdefault(kind, {})[seed] = (
            round(statistics.fmean(found[-LAST_STEPS:]), 4) if is_whole else None
        )
        curves[f"{kind}-{seed}"] = [round(value, 3) for value in found[4::10]]
    exact, shuffled, stock = (list(last[kind].values()) for kind in KINDS)
    return {
        "threshold": LEARNING_THRESHOLD,
        "steps": steps,
        "last_steps_mean": last,
        "learns": all(value is not None and value > LEARNING_THRESHOLD for value in exact),
        "shuffled_does_not": all(
            value is not None and value < LEARNING_THRESHOLD for value in shuffled
        ),
        "stock_within_seed_noise": within_noise(exact, stock),
        "every_tenth_reward": curves,
    }


def within_noise(exact: list[float | None], stock: list[float | None]) -> bool | None:
    """Whether the two means differ by no more than two seeds do; None where a run is missing."""
    ours = [value for value in exact if value is not None]
    theirs = [value for value in stock if value is not None]
    if len(ours) < len(exact) or len(theirs) < len(stock):
        return None
    noise = max(max(ours) - min(ours), max(theirs) - min(theirs))
    return abs(statistics.fmean(ours) - statistics.fmean(theirs)) <= noise


if __name__ == "__main__":
    main()
