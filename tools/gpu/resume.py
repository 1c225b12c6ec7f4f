"""Three runs of one recipe beside each other: two straight through, one stopped and resumed.

    python3 -m tools.gpu.resume gsm8k_smollm2_135m --steps 20 --runs-dir DIR [--set key=value ...]
        [--out OUT.json]

`x` and `y` take all steps. `z` is planned to half of them, ends, and is resumed to all. Then
`lockstep diff` compares x with y and x with z: both must be Identical. Every run is a process with
engines, folder and database of its own; they share the GPU, so no run watches its memory. With
`--straight-only` there is no z, and x against y may have any verdict: it is what is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CLI = (sys.executable, "-m", "flows.cli")


def main() -> None:
    """Run, compare, print and write; exit code 1 unless both are Identical."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs-dir", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=int, default=500)
    parser.add_argument("--straight-only", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun = time.monotonic()
    half = options.steps // 2
    common = [
        *(f"execution.device={options.device}", "execution.gpu_is_shared=true"),
        *(f"plan.checkpoint_every={half}", "plan.gates.controls=off"),
        *options.set,
    ]
    run = Runner(options.runs_dir, begun + options.limit_s)
    threads = [
        threading.Thread(target=run.straight, args=(options.recipe, name, options.steps, common))
        for name in ("x", "y")
    ]
    if not options.straight_only:
        threads.append(
            threading.Thread(target=run.resumed, args=(options.recipe, "z", options.steps, common))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    others = ("y",) if options.straight_only else ("y", "z")
    for other in others:
        if (options.runs_dir / "x").is_dir() and (options.runs_dir / other).is_dir():
            run.compare("x", other)
    figures = {
        "recipe": options.recipe,
        "steps": options.steps,
        "seconds": round(time.monotonic() - begun, 1),
        **run.found,
    }
    print(json.dumps(figures))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1))
    verdicts = [figures.get(f"x against {other}", {}).get("verdict") for other in others]
    is_answered = all(verdicts) if options.straight_only else set(verdicts) == {"Identical"}
    raise SystemExit(0 if is_answered else 1)


class Runner:
    """Calls the command line and keeps what it says."""

    def __init__(self, runs_dir: Path, deadline: float) -> None:
        self._runs_dir = runs_dir
        self._deadline = deadline
        self.found: dict[str, Any] = {}
        runs_dir.mkdir(parents=True, exist_ok=True)

    def straight(self, recipe: str, name: str, steps: int, overrides: list[str]) -> None:
        """Run all steps at once."""
        self._flow(name, name, "run", recipe, "--run-id", name, steps=steps, overrides=overrides)

    def resumed(self, recipe: str, name: str, steps: int, overrides: list[str]) -> None:
        """Run half of the steps, then the others in a fresh process."""
        half = steps // 2
        self._flow(
            f"{name}, first half", name, "run", recipe, "--run-id", name,
            steps=half, overrides=overrides,
        )  # fmt: skip
        self._flow(f"{name}, resumed", name, "resume", name, steps=steps, overrides=[])

    def _flow(
        self, label: str, database: str, *command: str, steps: int, overrides: list[str]
    ) -> None:
        changes = [*overrides, f"plan.num_steps={steps}"]
        flags = [part for change in changes for part in ("--set", change)]
        # A folder of its own for each run: its MLflow store lies there.
        runs_dir = self._runs_dir / f"of-{database}"
        answer = self._call(
            *command, *flags, "--runs-dir", str(runs_dir), "--json", database=database
        )
        folder = runs_dir / database
        if folder.is_dir() and not (self._runs_dir / database).exists():
            (self._runs_dir / database).symlink_to(folder)
        self.found[label] = {
            key: answer.get(key) for key in ("rc", "verdict", "headline", "seconds", "stderr")
        }
        print(label, json.dumps(self.found[label]), flush=True)

    def compare(self, one: str, other: str) -> None:
        """Find the first wrong bit between two runs' legs."""
        sides = [str((self._runs_dir / name).resolve() / "a") for name in (one, other)]
        answer = self._call("diff", *sides, "--json", database="diff")
        self.found[f"{one} against {other}"] = answer
        print(f"{one} against {other}", json.dumps(answer)[:400], flush=True)

    def _call(self, *arguments: str, database: str) -> dict[str, Any]:
        begun = time.monotonic()
        env = {**os.environ, "PREFECT_HOME": str(self._runs_dir / f"prefect-{database}")}
        try:
            done = subprocess.run(
                [*CLI, *arguments], capture_output=True, text=True, env=env,
                timeout=max(1, self._deadline - time.monotonic()),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"rc": "over the limit", "seconds": round(time.monotonic() - begun, 1)}
        answer: dict[str, Any] = {"rc": done.returncode}
        try:
            answer |= json.loads(done.stdout)
        except ValueError:
            answer["stdout"] = done.stdout[-500:]
        if done.returncode:
            answer["stderr"] = done.stderr[-800:]
        return answer | {"seconds": round(time.monotonic() - begun, 1)}


if __name__ == "__main__":
    main()
