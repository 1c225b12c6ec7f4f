"""Which ops a forward runs beside the shared ones, and whether each of them is exact.

An op that rounds and is not one of `engines.numerics` may give another result in another batch, or
in the other engine. So a forward is run once under a dispatch mode that collects the name of
every op that was not called from there; what is not on a list of ops that only move, reshape or
select values refuses to start. Runs inside an engine's process.

    with OpsOutside() as outside:
        model(inputs)
    require_exact(outside.names, EXACT_ROLLOUT_OPS, where="vLLM's forward")
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_specs.errors import EngineError

NUMERICS = "engines.numerics"


class OpsOutside(TorchDispatchMode):
    """Collects the names of ops that were not called from `engines.numerics`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _called_from_numerics():
            self.names.add(func.overloadpacket._qualified_op_name.replace("::", "."))
        return func(*args, **(kwargs or {}))


def _called_from_numerics() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(NUMERICS):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def require_exact(names: Iterable[str], exact: frozenset[str], *, where: str) -> tuple[str, ...]:
    """Return the names, sorted.

    Raises:
        EngineError: One of them is not in `exact`.
    """
    unknown = sorted(set(names) - exact)
    if unknown:
        raise EngineError(
            f"{where} runs {', '.join(unknown)} outside of the shared ops; a result of such an op "
            "may depend on the batch: route it through engines.numerics, or show that it is exact "
            "and list it"
        )
    return tuple(sorted(names))


@contextmanager
def audited(model: torch.nn.Module, method: str, mode: Any) -> Iterator[None]:
    """Run one method of `model` under a dispatch mode while the block lasts."""
    original = getattr(model, method)

    def under_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    setattr(model, method, under_mode)
    try:
        yield
    finally:
        delattr(model, method)
