"""An engine's own release of pages and weights, where vLLM has none: on CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.rollout.sleep import Sleeps
from model_specs.errors import EngineError


class Llm:
    """What `Sleeps` asks of vLLM: the model, its pages, and to forget prefixes."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        pages = torch.ones(2, 6, 4)
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=list(pages.unbind(0))))
        self.num_resets = 0

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def collective_rpc(self, function: Any) -> list[Any]:
        return [function(self.worker)]

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True


class Engine(Sleeps):
    def __init__(self) -> None:
        super().__init__()
        self._llm, self._on_cpu, self._version = Llm(), True, "3"

    def bytes_held(self) -> tuple[int, int]:
        """Of the weights, and of the pages."""
        weights = {p.untyped_storage().data_ptr(): p for p in self._parameters()}
        (pages, _) = self._kv_caches()
        held = sum(p.untyped_storage().nbytes() for p in weights.values())
        return held, pages.untyped_storage().nbytes()


WEIGHTS, PAGES = 4 * 2 * (64 + 8), 4 * 2 * 6 * 4


def test_at_level_one_only_pages_go_and_they_come_back_as_zeros() -> None:
    engine = Engine()
    before = [parameter.clone() for parameter in engine._parameters()]
    figures = engine.sleep(level=1)
    assert figures.keys() == {"before_mib", "after_mib"}
    assert engine.bytes_held() == (WEIGHTS, 0)
    assert engine.is_asleep
    assert engine._llm.num_resets == 1
    engine.wake()
    assert engine.bytes_held() == (WEIGHTS, PAGES)
    assert all(bool((pages == 0).all()) for pages in engine._kv_caches())
    for one, other in zip(before, engine._parameters(), strict=True):
        assert torch.equal(one, other)
    assert engine._version == "3"


def test_at_level_two_weights_go_too_and_the_engine_knows_that_it_has_none() -> None:
    engine = Engine()
    engine.sleep(level=2)
    assert engine.bytes_held()[1] == 0
    assert all(p.untyped_storage().nbytes() == 0 for p in engine._parameters())
    assert engine._version is None
    engine.wake(parts=("weights",))
    assert not engine.is_asleep
    assert engine.bytes_held() == (WEIGHTS, 0)
    with pytest.raises(EngineError, match="kv_cache sleep; nothing can be drawn"):
        engine._require_awake()
    engine.wake(parts=("kv_cache",))
    engine._require_awake()
    assert engine.bytes_held() == (WEIGHTS, PAGES)


def test_who_sleeps_is_not_sent_to_sleep_and_who_is_awake_is_not_woken() -> None:
    engine = Engine()
    with pytest.raises(EngineError, match="kv_cache, weights do not sleep"):
        engine.wake()
    engine.sleep(level=1)
    with pytest.raises(EngineError, match="sleep already"):
        engine.sleep(level=1)
    engine.wake(parts=("weights",))
    with pytest.raises(EngineError, match="weights do not sleep"):
        engine.wake(parts=("weights",))
