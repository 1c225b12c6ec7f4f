"""Which of two definitions of an op runs: the CPU's, or the one of `engines.numerics.cuda`.

Invariant: the device of an op's first tensor decides, and nothing else; a caller never says it. An
op without a definition on CUDA is refused there: the CPU's would run, and not be invariant.
Triton is imported when the first CUDA tensor arrives, never before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from model_specs.errors import UnsupportedError

Op = TypeVar("Op", bound=Callable[..., Any])

CUDA_OPS = "engines.numerics.cuda"


def by_device(op: Op) -> Op:
    """Return `op`, going to the op of the same name in `CUDA_OPS` where its tensors are on CUDA.

    Args:
        op: its first argument is a tensor or a sequence of tensors, given by place.

    Raises:
        UnsupportedError: When called with CUDA tensors, and `CUDA_OPS` has no op of that name.
    """
    name = op.__name__

    @functools.wraps(op)
    def dispatched(first: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = first if isinstance(first, torch.Tensor) else (first[0] if first else None)
        if tensor is not None and tensor.is_cuda:
            on_device = vars(importlib.import_module(CUDA_OPS)).get(name)
            if on_device is None:
                raise UnsupportedError(
                    f"the shared op {name} has no definition on CUDA, so a model that needs it "
                    "cannot run there; set execution.device=cpu"
                )
            return on_device(first, *args, **kwargs)
        return op(first, *args, **kwargs)

    return dispatched  # type: ignore[return-value]
