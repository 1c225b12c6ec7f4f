"""Random delays in generation and reward, where a leg is run under them on purpose.

Timing must not change a bit: neither the order in which engines finish, nor how long a reward
takes. Where `LOCKSTEP_DELAYS=SEED,MILLISECONDS` is set, each process sleeps for random times of
its own; the seed is from outside the trajectory, and no other generator is touched.

    pause()        # returns at once where nothing was asked for
    take_pauses()  # how often this process has slept since the last call
"""

from __future__ import annotations

import functools
import os
import random
import time

from model_specs.errors import SpecError
from model_specs.variation import DELAYS_VARIABLE

_taken: list[None] = []
"""One entry a pause; a list, since appending is atomic between threads."""


def pause() -> None:
    """Sleep for 0 to MILLISECONDS."""
    setting = os.environ.get(DELAYS_VARIABLE)
    if setting is None:
        return
    draw, longest_s = _delays(setting)
    time.sleep(draw.uniform(0.0, longest_s))
    _taken.append(None)


def take_pauses() -> int:
    """Return how often this process has slept since the last call."""
    count = len(_taken)
    del _taken[:count]
    return count


def are_asked_for() -> bool:
    """Whether this process is to sleep at all."""
    return DELAYS_VARIABLE in os.environ


@functools.cache
def _delays(setting: str) -> tuple[random.Random, float]:
    seed, comma, milliseconds = setting.partition(",")
    if not comma or not milliseconds.isdigit():
        raise SpecError(f"{DELAYS_VARIABLE}={setting!r} is not SEED,MILLISECONDS")
    # Two engines must not wait alike.
    return random.Random(f"{seed} {os.getpid()}"), int(milliseconds) / 1000
