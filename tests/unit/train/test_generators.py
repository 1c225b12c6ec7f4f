"""A draw from a generator with a state is refused by the generator's name."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engines.train.generators import untouched_generators
from model_specs.errors import EngineError

TOUCHES: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.nn.functional.dropout(torch.ones(2), p=0.5),
    "numpy": lambda: np.random.random(),
    "random": lambda: random.seed(1),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_a_generator_that_was_touched_is_named(name: str) -> None:
    text = f"the random generator of {name} was touched"
    with pytest.raises(EngineError, match=text), untouched_generators():
        TOUCHES[name]()


def test_a_generator_of_its_own_may_be_drawn_from() -> None:
    with untouched_generators():
        random.Random(1).random()
        torch.rand(1, generator=torch.Generator().manual_seed(1))


def failing() -> None:
    random.random()
    raise KeyError("the block's own")


def test_an_error_of_the_block_is_not_hidden() -> None:
    with pytest.raises(KeyError), untouched_generators():
        failing()
