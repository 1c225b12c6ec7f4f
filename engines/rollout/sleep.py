"""A sleeping rollout engine: its KV cache, and its weights, give their memory up.

On CUDA vLLM does it (`LLM.sleep`), which needs its own allocator from the start, so that addresses
in CUDA graphs stay valid. On CPU vLLM has none, and the storages are shrunk here. Level 1 keeps the
weights (CUDA: on the host), level 2 discards them. Invariants: pages are zero on waking, as they
were at the start, since a page's unused rows are read and masked; after level 2 nothing can be
drawn until a push has brought all weights again.

    engine.sleep(level=1)
    engine.wake(parts=("weights",))      # a push may come
    engine.wake(parts=("kv_cache",))     # and now draws
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engines.memory import process_memory
from model_specs.errors import EngineError

PARTS = ("weights", "kv_cache")
"""vLLM's tags, in the order of waking."""


class Sleeps:
    """The part of `engines.rollout.vllm_engine.VllmEngine` that sleeps."""

    _llm: Any
    _on_cpu: bool
    _version: str | None

    def __init__(self) -> None:
        self._asleep: set[str] = set()
        self._shrunk: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    @property
    def is_asleep(self) -> bool:
        """Whether no part is awake; `engines.host.Host` lets nothing but `wake` through then."""
        return len(self._asleep) == len(PARTS)

    def sleep(self, *, level: int) -> dict[str, float]:
        """Give memory up; return MiB in use before and after.

        Args:
            level: 1 keeps the weights, 2 discards them.

        Raises:
            EngineError: A part sleeps already.
        """
        if self._asleep:
            raise EngineError(f"the engine's {', '.join(sorted(self._asleep))} sleep already")
        before = process_memory()
        if self._on_cpu:
            self._llm.reset_prefix_cache()
            self._shrunk = {"kv_cache": _shrink(self._kv_caches())}
            self._shrunk["weights"] = _shrink(self._parameters()) if level == 2 else []
        else:
            self._llm.sleep(level=level)
        self._asleep = set(PARTS)
        if level == 2:
            self._version = None  # until a push has come, `generate` refuses
        return {"before_mib": before, "after_mib": process_memory(release=True)}

    def wake(self, *, parts: Sequence[str] = PARTS) -> dict[str, float]:
        """Take memory again; return MiB in use before and after.

        Raises:
            EngineError: A part is awake.
        """
        awake = sorted(set(parts) - self._asleep)
        if awake:
            raise EngineError(f"the engine's {', '.join(awake)} do not sleep")
        before = process_memory()
        for part in parts:
            if self._on_cpu:
                for storage, size in self._shrunk.pop(part):
                    storage.resize_(size)
            else:
                self._llm.wake_up(tags=[part])
            self._asleep.remove(part)
        if "kv_cache" in parts:
            for pages in self._kv_caches():
                pages.zero_()
        return {"before_mib": before, "after_mib": process_memory()}

    def _require_awake(self) -> None:
        if self._asleep:
            raise EngineError(
                f"the engine's {', '.join(sorted(self._asleep))} sleep; nothing can be drawn "
                "before they are woken"
            )

    def _kv_caches(self) -> list[torch.Tensor]:
        (caches,) = self._llm.collective_rpc(lambda worker: list(worker.model_runner.kv_caches))
        return list(caches)

    def _parameters(self) -> list[torch.Tensor]:
        (model,) = self._llm.apply_model(lambda model: model)
        return [parameter.detach() for parameter in model.parameters()]


def _shrink(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Free the memory of each storage; return it with the size that it had."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
    shrunk = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in shrunk:
        storage.resize_(0)
    return shrunk
