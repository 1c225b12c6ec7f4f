"""Is anything learned, and only from the reward: three seeds, exact, shuffled and stock.

    python3 -m tools.learning --runs-dir DIR [--device cpu] [--steps 100] [--seeds 4 5 6]
        [--shuffled-seeds 4 5 6 7 8 9] [--beside 1] [--limit-s 900] [--out OUT.json]

Runs `tiny_cpu` as `KIND-SEED` for every kind and seed that is not in DIR yet, `--beside` at a time,
then judges by the second criterion of docs/measurements/2026-11-29-learning-tiny.md, which was
written before its runs. Of each run it takes the mean reward of the last 20 steps; its rise is that
less the reward of step 1, where nothing has been trained.

- Learns: every exact run ends above the recipe's LEARNING_THRESHOLD and above every shuffled one.
- Shuffled rewards do not rise: one-sided t-test of the rises over seeds, p at least 0.05.
- Stock: the means of exact and stock differ by at most as much as two seeds of one numerics.

The first criterion, every shuffled run below the threshold, is reported beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scipy import stats

from model_specs.recipes.tiny_cpu import LEARNING_THRESHOLD

LAST_STEPS = 20
SIGNIFICANCE = 0.05
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6])
    parser.add_argument("--shuffled-seeds", type=int, nargs="+", default=[4, 5, 6, 7, 8, 9])
    parser.add_argument("--beside", type=int, default=1)
    parser.add_argument("--limit-s", type=int, default=900)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    seeds = {kind: options.seeds for kind in KINDS} | {"shuffled": options.shuffled_seeds}
    wanted = [(kind, seed) for kind in KINDS for seed in seeds[kind]]
    with ThreadPoolExecutor(options.beside) as pool:
        for name, code in pool.map(lambda pair: run(pair[0], pair[1], options, deadline), wanted):
            print(f"{name}: rc {code}", flush=True)
    runs = {pair: rewards(options.runs_dir, "-".join(map(str, pair))) for pair in wanted}
    found = judge(runs, options.steps)
    print(json.dumps(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    judged = ("learns", "shuffled_does_not_rise", "stock_within_seed_noise")
    raise SystemExit(0 if all(found[name] for name in judged) else 1)


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


def judge(runs: Mapping[tuple[str, int], list[float]], steps: int) -> dict[str, Any]:
    """Hold what was run against the criterion.

    Args:
        runs: Kind and seed -> mean reward of every step.
        steps: How many steps make a run; one that is missing or short fails what it is needed for.
    """
    short = [f"{kind}-{seed}" for (kind, seed), found in runs.items() if len(found) < steps]
    last: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    rises: list[float] = []
    for (kind, seed), found in runs.items():
        if len(found) < steps:
            continue
        last[kind][seed] = statistics.fmean(found[-LAST_STEPS:])
        if kind == "shuffled":
            rises.append(last[kind][seed] - found[0])
    exact, shuffled, stock = (list(last[kind].values()) for kind in KINDS)
    is_whole = not short and min(len(exact), len(shuffled), len(stock)) > 1
    p_value = (
        float(stats.ttest_1samp(rises, 0.0, alternative="greater").pvalue) if is_whole else None
    )
    return {
        "threshold": LEARNING_THRESHOLD,
        "steps": steps,
        "short_or_missing": short,
        "last_steps_mean": {
            kind: {seed: round(value, 4) for seed, value in of.items()} for kind, of in last.items()
        },
        "learns": is_whole and min(exact) > max(LEARNING_THRESHOLD, *shuffled),
        "shuffled_rises": [round(rise, 4) for rise in rises],
        "shuffled_rise_p": p_value,
        "shuffled_does_not_rise": p_value is not None and p_value >= SIGNIFICANCE,
        "shuffled_all_below_threshold": is_whole and max(shuffled) < LEARNING_THRESHOLD,
        "stock_within_seed_noise": is_whole and within_noise(exact, stock),
        "every_tenth_reward": {
            f"{kind}-{seed}": [round(value, 3) for value in found[4::10]]
            for (kind, seed), found in runs.items()
        },
    }


def within_noise(exact: list[float], stock: list[float]) -> bool:
    """Whether the two means differ by no more than two seeds of one numerics do."""
    noise = max(max(exact) - min(exact), max(stock) - min(stock))
    return abs(statistics.fmean(exact) - statistics.fmean(stock)) <= noise


if __name__ == "__main__":
    main()
