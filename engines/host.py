"""The one generic Ray actor: it makes an engine from an import path inside its own process.

The driver therefore never imports torch, vllm or megatron; it names a class and sends plain values.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from model_specs.errors import EngineError

CALLED_ASLEEP = frozenset({"wake", "environment", "close"})
"""Methods that need no tensor of the engine."""


def load(import_path: str) -> Any:
    """Return the object that `package.module:name` names."""
    module_name, _, attribute = import_path.partition(":")
    if not attribute:
        raise ValueError(f"not an import path of the form package.module:name: {import_path!r}")
    return getattr(importlib.import_module(module_name), attribute)


class Host:
    """Holds one engine; made remote by `engines.cluster`."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.engine: Any = None

    def create(self, import_path: str, *args: Any, **kwargs: Any) -> None:
        """Make the engine; apart from `__init__` so that a failure arrives with its own message."""
        self.engine = load(import_path)(*args, **kwargs)

    def prepare(self, import_path: str) -> None:
        """Import an engine's module before it is made; what fails here fails again there."""
        load(import_path)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine.

        Raises:
            EngineError: The engine sleeps, so that its tensors have no memory, and the method is
                another than those that it has asleep.
        """
        if getattr(self.engine, "is_asleep", False) and method not in CALLED_ASLEEP:
            raise EngineError(
                f"{method} was called on an engine that sleeps: its tensors have no memory now; "
                "wake it first (engines.turns)"
            )
        return getattr(self.engine, method)(*args, **kwargs)

    def run(self, import_path: str, *args: Any, **kwargs: Any) -> Any:
        """Run a function in this process."""
        return load(import_path)(*args, **kwargs)

    def on_engine(self, import_path: str, *args: Any, **kwargs: Any) -> Any:
        """Run a function on the engine itself, as its first argument."""
        return load(import_path)(self.engine, *args, **kwargs)

    def identity(self) -> dict[str, float | int]:
        """Return pid and start time (seconds since the epoch) of this process."""
        return {"pid": os.getpid(), "started_at": self.started_at}
