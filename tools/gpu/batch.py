"""A list of checks on one GPU machine: each a process with a time limit, some beside each other.

    python3 -m tools.gpu.batch PLAN.json --out OUT [--phase 1] [--only NAME ...]
        [--value model=FOLDER ...]

PLAN.json: {"phases": [[LANE, ...], ...]}; `--phase` takes one of them alone, counted from 1.
Phases run one after the other, the lanes of a phase beside each other, the parts of a lane one
after the other. A part is {"name", "limit_s", "command"}. In a command, `{json}` is where the part
writes its figures, `{scratch}` a folder for all parts, and `{model}` and the like what `--value`
gives; a part whose value is not given is not run. A part that fails or runs over its limit stops
nothing. Prints a line a part as it ends, and the end of its output where it failed. Writes
OUT/results.json (rc, seconds and figures of every part) and OUT/logs.txt (the end of each output).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LINES_SHOWN = 12
LINES_KEPT = 300


def main() -> None:
    """Run the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phase", type=int, help="the only phase to run, counted from 1")
    parser.add_argument("--only", nargs="*", help="names of the parts to run; all when omitted")
    parser.add_argument("--value", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    values = dict(pair.split("=", 1) for pair in options.value)
    phases = json.loads(options.plan.read_text())["phases"]
    if options.phase:
        phases = phases[options.phase - 1 : options.phase]
    batch = Batch(options.out, values)
    for phase in phases:
        lanes = [
            [part for part in lane if not options.only or part["name"] in options.only]
            for lane in phase
        ]
        threads = [threading.Thread(target=batch.run_lane, args=(lane,)) for lane in lanes if lane]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Batch:
    """Runs parts and keeps what they leave."""

    def __init__(self, out: Path, values: dict[str, str]) -> None:
        self._values = {f"{{{name}}}": value for name, value in values.items()}
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._scratch = Path(tempfile.mkdtemp(prefix="batch-"))
        self._results: dict[str, Any] = {}
        self._logs: dict[str, str] = {}
        self._lock = threading.Lock()

    def run_lane(self, lane: list[dict[str, Any]]) -> None:
        """Run the parts of a lane one after the other."""
        for part in lane:
            self._run(part)

    def _run(self, part: dict[str, Any]) -> None:
        name = part["name"]
        figures = self._scratch / f"{name}.json"
        log = self._scratch / f"{name}.log"
        replaced = {"{json}": str(figures), "{scratch}": str(self._scratch), **self._values}
        command = list(part["command"])
        for place, value in replaced.items():
            command = [word.replace(place, value) for word in command]
        missing = sorted({found for word in command for found in re.findall(r"{\w+}", word)})
        if missing:
            log.write_text(f"not run: give --value for {', '.join(missing)}\n")
            self._keep(name, "not run", 0.0, figures, log)
            return
        # Flows of parts that run beside each other must not share a database.
        env = {**os.environ, "PREFECT_HOME": str(self._scratch / f"prefect-{name}")}
        started = time.monotonic()
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            try:
                code: int | str = process.wait(timeout=part["limit_s"])
            except subprocess.TimeoutExpired:
                code = f"over its limit of {part['limit_s']} s"
            # Its engines are processes of its session too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = round(time.monotonic() - started, 1)
        self._keep(name, code, seconds, figures, log)

    def _keep(self, name: str, code: int | str, seconds: float, figures: Path, log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()
        found = json.loads(figures.read_text()) if figures.is_file() else None
        with self._lock:
            self._results[name] = {"rc": code, "seconds": seconds, "figures": found}
            self._logs[name] = "\n".join(lines[-LINES_KEPT:])
            (self._out / "results.json").write_text(json.dumps(self._results, indent=1))
            (self._out / "logs.txt").write_text(
                "".join(f"===== {part}\n{text}\n" for part, text in self._logs.items())
            )
            print(f"{name}: rc {code}, {seconds} s; {lines[-1][:200] if lines else ''}", flush=True)
            if code != 0:
                print("\n".join(f"    {line[:300]}" for line in lines[-LINES_SHOWN:]), flush=True)


if __name__ == "__main__":
    main()
