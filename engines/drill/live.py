"""Break one live thing in the process it lives in, and mend it again.

    breaker: Callable[[Any], AbstractContextManager[None]]     # given the live engine or bench
    start_fault(engine, "engines.drill.in_trainer:gradient_scale")
    end_fault(engine)

Invariant: after `end_fault` every name that was replaced has its own value again; values that were
changed in place are brought back by loading a checkpoint and by a push.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from engines.host import load

_FAULTS = ExitStack()
_INHERITED = object()


def start_fault(engine: Any, breaker: str) -> None:
    """Enter the context manager `package.module:name` of this engine, in this process."""
    _FAULTS.enter_context(load(breaker)(engine))


def end_fault(engine: Any) -> None:
    """Leave what was entered in this process."""
    _FAULTS.close()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Give `owner.name` another value while the block lasts; yields the own one.

    `owner` is a module, a class or an object; an object that only inherits the name loses its own
    afterwards.
    """
    honest = getattr(owner, name)
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield honest
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
