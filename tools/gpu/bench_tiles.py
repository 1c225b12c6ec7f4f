"""Which tile of the shared matrix product is fast at which shape, and that none decides a bit.

    python3 -m tools.gpu.bench_tiles OUT.json [qwen|smol]

For each shape and number of rows: microseconds of every candidate tile, forward and input gradient,
as replays of a CUDA graph with the L2 cache flushed. Every result is compared with that of the
first candidate; a tile with other bits ends the program with an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from engines.numerics.cuda.matmul import Tile, add_weight_gradient, chosen_tile, matmul
from tools.gpu.bench_ops import median_us, random

SHAPES = {
    "qwen": {
        "qkv": (896, 1152), "o": (896, 896), "gate_up": (896, 9728), "down": (4864, 896),
        "head": (896, 151936),
    },
    "smol": {
        "qkv": (576, 960), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152),
    },
}  # fmt: skip
FEW = (
    Tile(128, 32, 64, 4, 4), Tile(64, 32, 64, 4, 4), Tile(64, 32, 128, 4, 4),
    Tile(64, 16, 64, 4, 6), Tile(64, 16, 128, 4, 4), Tile(64, 64, 64, 4, 4),
    Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 4, 4),
)  # fmt: skip
MANY = (
    Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3), Tile(256, 128, 64, 8, 3),
    Tile(64, 256, 64, 4, 4), Tile(128, 256, 64, 8, 4),
)  # fmt: skip

OUTER = (
    Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 4), Tile(128, 256, 64, 8, 3), Tile(256, 128, 64, 8, 3),
    Tile(64, 256, 64, 4, 4),
)  # fmt: skip
"""Of the weight gradient."""


def measure(k: int, n: int, rows: int) -> dict[str, dict[str, float]]:
    """Return tile -> microseconds of `linear` and of its input gradient."""
    x, weight = random(rows, k), random(n, k, scale=0.02)
    gradient = random(rows, n)
    times: dict[str, dict[str, float]] = {}
    first: list[torch.Tensor] = []
    for tile in FEW if rows <= 256 else MANY:
        name = f"{tile.rows}x{tile.columns}x{tile.inner} {tile.warps}w {tile.stages}s"
        try:
            found = [
                matmul(x, weight, transposed=True, tile=tile),
                matmul(gradient, weight, transposed=False, tile=tile),
            ]
        except Exception as error:  # more shared memory than there is
            print(f"  {name}: {type(error).__name__}")
            continue
        first = first or found
        if not all(map(torch.equal, first, found)):
            raise SystemExit(f"{name} has other bits at {rows} x {k} x {n}")
        times[name] = {
            "forward": median_us(lambda t=tile: matmul(x, weight, transposed=True, tile=t)),
            "input gradient": median_us(
                lambda t=tile: matmul(gradient, weight, transposed=False, tile=t)
            ),
        }
    return times


def measure_weight_gradient(k: int, n: int, rows: int) -> dict[str, dict[str, float]]:
    """Return tile -> microseconds of the weight gradient."""
    x, gradient = random(rows, k), random(rows, n)
    times: dict[str, dict[str, float]] = {}
    first = None
    for tile in OUTER:
        name = f"{tile.rows}x{tile.columns} {tile.warps}w {tile.stages}s"
        total = torch.zeros(n, k, dtype=torch.float32, device="cuda")
        try:
            add_weight_gradient(total, gradient, x, fresh=True, tile=tile)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}")
            continue
        if first is None:
            first = total.clone()
        if not torch.equal(first, total):
            raise SystemExit(f"{name} has other bits in the weight gradient {rows} x {k} x {n}")
        us = median_us(
            lambda t=tile, s=total: add_weight_gradient(s, gradient, x, fresh=True, tile=t)
        )
        times[name] = {"us": us, "TFLOP/s": 2e-6 * rows * k * n / us}
    return times


def main() -> None:
    """Measure all shapes and print the best three of each beside what is chosen now."""
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "times_us": {}}
    for model in sys.argv[2:] or SHAPES:
        for name, (k, n) in SHAPES[model].items():
            for rows in (32, 128, 1024, 4096, 16384):
                if n > 40000 and rows > 4096:
                    continue
                times = measure(k, n, rows)
                report["times_us"][f"{model} {name} {rows}"] = times
                chosen = chosen_tile(rows, n, torch.bfloat16)
                best = sorted(times, key=lambda tile: times[tile]["forward"])[:3]
                print(
                    f"{model} {name:8} {rows:6}  now {chosen.rows}x{chosen.columns}x{chosen.inner} "
                    f"{chosen.warps}w {chosen.stages}s |",
                    "; ".join(
                        f"{tile} {times[tile]['forward']:.1f}, {times[tile]['input gradient']:.1f}"
                        for tile in best
                    ),
                    flush=True,
                )
            for rows in (4096,):
                times = measure_weight_gradient(k, n, rows)
                report["times_us"][f"{model} {name} {rows} dW"] = times
                best = sorted(times, key=lambda tile: times[tile]["us"])[:3]
                print(
                    f"{model} {name:8} {rows:6} dW |",
                    "; ".join(
                        f"{t} {times[t]['us']:.1f} ({times[t]['TFLOP/s']:.0f} TFLOP/s)"
                        for t in best
                    ),
                    f"; first {next(iter(times.values()))['us']:.1f}",
                    flush=True,
                )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
