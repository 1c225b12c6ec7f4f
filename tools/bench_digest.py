"""Measure the tensor digest: gigabytes a second on one core, and microseconds for a small tensor.

    python tools/bench_digest.py [--mib 256] [--repeats 5]

CPU time of the thread is measured, so that other work on the machine counts little; the best of
the repeats is reported. Sizes are of the tensor's own bytes, 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from engines.provenance import digest
from engines.provenance.tensor_digest import digest_tensor, partial_of_tensor


def best_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the shortest of `repeats` calls, after one that compiles and warms up."""
    function()
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        function()
        times.append(time.thread_time() - started)
    return min(times)


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = arguments.mib * 2**20
    kernel = "numba" if digest.compiled_kernel() else "numpy"
    print(f"kernel {kernel}, {arguments.mib} MiB, best of {arguments.repeats}, one thread")
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        columns = 1024
        rows = size // (columns * dtype.itemsize)
        tensor = torch.randint(0, 100, (rows, columns), dtype=torch.uint8).to(dtype)
        cases: dict[str, Callable[[], object]] = {
            "contiguous": lambda tensor=tensor: digest_tensor("w", tensor),
            "columns": lambda tensor=tensor: partial_of_tensor(
                tensor[:, 256:768], name="w", shape=tensor.shape, column_offset=256
            ),
        }
        for case, function in cases.items():
            share = 0.5 if case == "columns" else 1.0
            seconds = best_seconds(function, arguments.repeats)
            print(f"{dtype!s:16} {case:12} {share * size / seconds / 1e9:6.2f} GB/s")
    small = torch.randn(64)
    seconds = best_seconds(lambda: [digest_tensor("w", small) for _ in range(1000)], 3)
    print(f"{'float32':16} {'64 elements':12} {seconds * 1e3:6.1f} us a tensor")


if __name__ == "__main__":
    main()
