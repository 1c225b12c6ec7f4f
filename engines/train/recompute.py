"""Gradient checkpointing: run a part's forward again in backward instead of keeping its values.

The shared ops draw nothing at random and give a row the same bits every time, so the recomputed
values, and with them all gradients, are the kept ones bit for bit.

    hidden, context = recomputed(layer_forward, hidden, slot)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recomputed(forward: Callable[..., Result], *args: object, **kwargs: object) -> Result:
    """Call `forward`, keeping only its arguments for backward; plainly where none will follow."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    result: Result = checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
    )
    return result
