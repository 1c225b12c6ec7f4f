"""Where the time of a trainer's update goes on the GPU: phases, evidence, launches, waits.

    python3 -m tools.gpu.step_profile [OUT.json] [--recipe gsm8k_smollm2_135m] [--samples 16]

Random weights and samples of the recipe's shape; the trainer of the product, in this process. First
the phases by the clock, with the device waited for at the end of each, then one update under
torch's profiler: kernels, their time, launches, copies, and waits of the host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.train.group import trainer_env
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe

PHASES = ("_gradients", "_norm", "_step")
"""Methods of the trainer that are timed; `digests` are three calls of `merged_digests`."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--recipe", default="gsm8k_smollm2_135m")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    options = parser.parse_args()
    spec = apply_overrides(
        load_recipe(options.recipe),
        (f"execution.device={options.device}", "loss.reference=false", *options.set),
    )
    os.environ.update(trainer_env(spec))
    folder = Path(options.scratch) / f"step-profile-{spec.recipe}"
    report = profile(spec, options.samples, options.updates, folder)
    print(json.dumps(report, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))


def profile(spec: Any, count: int, updates: int, folder: Path) -> dict[str, Any]:
    """Return the figures of `updates` updates of one set of samples."""
    import torch

    from engines.provenance.evidence_time import take_seconds
    from engines.train import trainer as trainer_module
    from tools.gpu.local_trainer import samples, started

    chosen = samples(spec, count)
    laps: dict[str, list[float]] = defaultdict(list)

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            wait()
            laps[name].append(time.perf_counter() - began)
            return result

        return call

    with started(spec, folder) as trainer:
        score, update, send = trainer.score, trainer.update, trainer.wire_tensors
        for number in range(2):  # compiles all kernels
            score(chosen)
            update(chosen, step=1 + number, update=0)
        take_seconds()
        timed_score, timed_update = timed("score", score), timed("update", update)
        with patched(trainer, trainer_module, timed):
            for number in range(updates):
                timed_score(chosen)
                timed_update(chosen, step=3 + number, update=0)
                timed("cast for sending", lambda: list(send()))()
        evidence = take_seconds() / updates
        phases = {name: round(statistics.median(values) * 1e3, 1) for name, values in laps.items()}
        phases["digests"] *= 3  # gradients, moments (twice as large), weights: a median call each
        score(chosen)
        events = under_profiler(lambda: update(chosen, step=9, update=0))
    return {
        "recipe": spec.recipe,
        "samples": count,
        "tokens": sum(len(sample.token_ids) for sample in chosen),
        "tensors": len(trainer._shards),
        "phases_ms": phases,
        "evidence_s": round(evidence, 4),
        "one_update": events,
    }


@contextmanager
def patched(trainer: Any, module: Any, timed: Callable[..., Any]) -> Iterator[None]:
    """Time the phases while the block lasts."""
    digests = module.merged_digests
    module.merged_digests = timed("digests", digests)
    for name in PHASES:
        setattr(trainer, name, timed(name, getattr(trainer, name)))
    try:
        yield
    finally:
        module.merged_digests = digests
        for name in PHASES:
            delattr(trainer, name)


def under_profiler(call: Callable[[], Any]) -> dict[str, Any]:
    """Return counts and times of one call from torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    averages = recorded.key_averages()
    kernels = [row for row in averages if row.device_type.name == "CUDA"]
    host = [row for row in averages if row.device_type.name == "CPU"]
    return {
        "kernels": sum(row.count for row in kernels),
        "kernel_ms": round(sum(row.self_device_time_total for row in kernels) / 1e3, 1),
        "runtime_calls": {
            row.key: {"count": row.count, "ms": round(row.self_cpu_time_total / 1e3, 1)}
            for row in host
            if row.key.startswith(("cuda", "cu"))
        },
        "longest_kernels": top(kernels, "self_device_time_total"),
        "longest_on_host": top(host, "self_cpu_time_total"),
    }


def top(rows: list[Any], key: str, *, most: int = 25) -> list[str]:
    """Return the rows with the largest totals as text."""
    chosen = sorted(rows, key=lambda row: -getattr(row, key))[:most]
    return [f"{getattr(row, key) / 1e3:9.1f} ms {row.count:7} x {row.key[:90]}" for row in chosen]


if __name__ == "__main__":
    main()
