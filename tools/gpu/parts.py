"""How the GPU tools are run: named parts, each in a process of its own, with a time limit.

A part is a generator of (what, figures). It is killed at its limit with all that it started; each
result is printed as it comes and added to one JSON file, so that nothing found is lost.

    main(PARTS, description=__doc__, module="tools.gpu.two_gpus")
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engines import guard
from engines.placement import node_gpus
from tools.gpu.legs import Leg, World, as_json, first_difference

SHOWN = 600
"""Characters of a result that are printed; the file has all."""
Results = Iterator[tuple[str, Any]]


class Run:
    """What the parts share: the world, where they leave things, and what was asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device: str = options.device
        self.scratch = Path(options.scratch)
        self.ranks = int(options.ranks) if options.ranks else most_ranks(self.device)
        shape = options.shape or ("tiny_cpu" if self.device == "cpu" else "gsm8k_smollm2_135m")
        self.world = World.make(shape=shape, device=self.device, folder=self.scratch / shape)
        self.options = options

    def keep(self, leg: Leg) -> None:
        """Leave the reference for later parts."""
        (self.scratch / "reference.pickle").write_bytes(pickle.dumps(leg))

    def reference(self) -> Leg:
        """Return what `keep` left."""
        leg: Leg = pickle.loads((self.scratch / "reference.pickle").read_bytes())
        return leg


def most_ranks(device: str) -> int:
    """Return the largest power of two of GPUs here; two on CPU."""
    count = len(node_gpus()) if device == "cuda" else 2
    return 1 << (count.bit_length() - 1)


Parts = Mapping[str, tuple[Callable[[Run], Results], int]]
"""Name -> (function, limit in seconds)."""


def verdict(a: Leg, b: Leg) -> dict[str, Any]:
    difference = first_difference(a.digests, b.digests)
    return {
        "first difference": difference,
        "same chain": a.chain == b.chain,
        "chain": b.chain,
        "verdict": "Identical" if difference is None and a.chain == b.chain else "Diverged",
    }


def tried(name: str, work: Callable[[], Any]) -> Results:
    """Yield what the work returned, or that it failed; later work goes on."""
    began = time.perf_counter()
    try:
        found = work()
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}"[:1500]}
    yield name, {**found, "whole_s": round(time.perf_counter() - began, 1)}


def main(parts: Parts, *, description: str, module: str) -> None:
    """Run the parts one after the other, or, with `--inside`, one of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--shape", help="recipe whose model is used")
    parser.add_argument("--scratch", default=str(Path(tempfile.gettempdir()) / "lockstep-gpu"))
    parser.add_argument("--out", default="gpu-parts.json")
    parser.add_argument("--ranks", help="most ranks, one a GPU: a power of two; default: all GPUs")
    parser.add_argument("--patience", type=float, default=1.0, help="times every limit")
    parser.add_argument("--inside", action="store_true", help="run the one part here")
    options = parser.parse_args()
    Path(options.scratch).mkdir(parents=True, exist_ok=True)
    if options.inside:
        inside(options, parts)
        return
    for name in options.parts.split(","):
        outside(options, name, limit=parts[name][1], module=module)


def outside(options: argparse.Namespace, name: str, *, limit: float, module: str) -> None:
    """Run a part in a process group of its own, and end all of it at the limit."""
    limit *= options.patience
    program = [sys.executable, "-m", module, "--inside", "--parts", name]
    for key in ("device", "scratch", "out", "shape", "ranks"):
        value = getattr(options, key)
        program += [f"--{key}", value] if value is not None else []
    began = time.perf_counter()
    process = subprocess.Popen(program, start_new_session=True)
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end_group(process)
    seconds = round(time.perf_counter() - began, 1)
    if code is None:
        time.sleep(guard.GRACE_S + guard.TERMINATE_S)
    ended = "at its limit" if code is None else f"with {code}"
    tell(options.out, name, "ended", {"how": ended, "seconds": seconds, "limit": limit})


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def inside(options: argparse.Namespace, parts: Parts) -> None:
    """Run one part here and tell each of its results."""
    guard.start()  # Ray's daemons are in groups of their own, and have to end with this process
    run = Run(options)
    for name, found in parts[options.parts][0](run):
        tell(options.out, options.parts, name, found)


def tell(out: str, part: str, name: str, found: Any) -> None:
    """Print one result and add it to the file."""
    print(f"{part}: {name}: {as_json(found)}"[:SHOWN], flush=True)
    path = Path(out)
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything.setdefault(part, {})[name] = json.loads(as_json(found))
    path.write_text(json.dumps(everything, indent=1))
