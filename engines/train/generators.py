"""No draw of a training comes from a generator with a state, and that is looked at.

Every draw is a hash of what it is for (`engines.seeds`). A library that draws from the process's
generators instead (dropout that was left on, a data set that seeds them) would make bits depend on
what ran before.

    with untouched_generators():
        gradients = backward(slots)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import torch

from model_specs.errors import EngineError


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Require that nothing in the block draws from, or seeds, this process's generators.

    Raises:
        EngineError: Names the generators that were touched.
    """
    before = _states()
    yield
    after = _states()
    touched = [name for name, state in before.items() if after[name] != state]
    if touched:
        raise EngineError(
            f"the random generator of {', '.join(touched)} was touched while gradients were taken; "
            "a draw that depends on what ran before does not repeat: derive it from a seed of its "
            "own, and leave dropout off"
        )


def _states() -> dict[str, str]:
    """Return generator -> digest of its state."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(legacy=True)[1].tobytes(),  # type: ignore[index, union-attr]
        "random": repr(random.getstate()).encode(),
    }
    # Asking a GPU that nothing here uses would take half a gigabyte of it.
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: sha256(state).hexdigest() for name, state in states.items()}
