"""Random values on the device, and whether what is computed from them has one outcome."""

from __future__ import annotations

from collections.abc import Callable

import torch


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def assert_one_outcome_of_fifty(once: Callable[[], list[torch.Tensor]]) -> None:
    """Compute 51 times, 50 of them while a second stream keeps the device busy; none is zero."""
    first = once()
    noise, busy = torch.cuda.Stream(), random(4096, 4096)
    outcomes = 0
    for _ in range(50):
        with torch.cuda.stream(noise):
            for _ in range(4):
                busy = (busy @ busy).mul_(1e-3)
        outcomes += all(map(torch.equal, first, once()))
    torch.cuda.synchronize()
    assert outcomes == 50
    assert all(value.float().abs().max() > 0 for value in first)
