"""What is broken on purpose has its own value again afterwards, whatever it was."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engines.drill.live import end_fault, replaced, start_fault


class Base:
    value = 1

    def method(self) -> str:
        return "honest"

    @classmethod
    def made(cls) -> str:
        return cls.__name__


def test_an_inherited_name_an_own_one_and_none_come_back() -> None:
    thing = Base()
    with replaced(thing, "method", lambda: "broken") as honest:
        assert (thing.method(), honest()) == ("broken", "honest")
    assert vars(thing) == {}
    with replaced(Base, "made", lambda: "broken"):
        assert Base.made() == "broken"
    assert Base.made() == "Base"
    module = types.ModuleType("module")
    module.value = None  # type: ignore[attr-defined]
    with replaced(module, "value", 2):
        assert module.value == 2
    assert vars(module)["value"] is None


def test_it_comes_back_when_the_block_raises() -> None:
    with pytest.raises(KeyError), replaced(Base, "value", 2):
        raise KeyError
    assert Base.value == 1


def test_what_does_not_exist_cannot_be_replaced() -> None:
    with pytest.raises(AttributeError, match="nothing"), replaced(Base, "nothing", 1):
        pass
    assert not hasattr(Base, "nothing")


@contextmanager
def answering_wrong(engine: Base) -> Iterator[None]:
    with replaced(engine, "method", lambda: "broken"):
        yield


def test_a_fault_lasts_from_start_to_end() -> None:
    engine = Base()
    start_fault(engine, f"{__name__}:answering_wrong")
    assert engine.method() == "broken"
    end_fault(engine)
    assert engine.method() == "honest"
