"""Is an all-reduce the same bits in every launch, and which algorithm does NCCL run? One rank.

    python3 -m tools.gpu.launches RANK WORLD RENDEZVOUS OUT.json [--device cuda] [--sizes ...]

A launch is a set of fresh processes, one a GPU, with a fresh communicator; the algorithm is what
`NCCL_ALGO` said before torch was loaded. The tensors are fixed. `tools.gpu.two_gpus` starts them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

SIZES = (1 << 10, 1 << 16, 1 << 22, 1 << 24)
"""Elements."""


def main() -> None:
    """Reduce, digest, time; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("rendezvous")
    parser.add_argument("out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", type=int, default=None, help="index; None takes the rank")
    options = parser.parse_args()
    found = reduced(options)
    if options.rank == 0:
        Path(options.out).write_text(json.dumps(found))


def reduced(options: argparse.Namespace) -> dict[str, Any]:
    """Return the digest and the milliseconds of each all-reduce, and the variables in force."""
    import torch
    import torch.distributed as dist

    on_gpu = options.device == "cuda"
    device = torch.device(options.device)
    if on_gpu:
        device = torch.device("cuda", options.rank if options.gpu is None else options.gpu)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=options.rendezvous,
        rank=options.rank,
        world_size=options.world,
    )
    digests, milliseconds = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES if on_gpu else SIZES[:2]:
            generator = torch.Generator().manual_seed(1000 * options.rank + size % 997)
            fixed = torch.randn(size, generator=generator).to(device, dtype)
            for turn in range(3 if on_gpu else 1):
                summed = fixed.clone()
                _wait(on_gpu)
                started = time.perf_counter()
                dist.all_reduce(summed)
                _wait(on_gpu)
                elapsed = time.perf_counter() - started
                name = f"{str(dtype).removeprefix('torch.')} {size}"
                found = hashlib.sha256(summed.view(torch.uint8).cpu().numpy().tobytes())
                digests[f"{name} #{turn}"] = found.hexdigest()[:16]
                milliseconds[name] = round(elapsed * 1e3, 3)
    dist.destroy_process_group()
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {"digests": digests, "milliseconds": milliseconds, "variables": variables}


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
