"""What the second leg of a nightly is run under on purpose, none of which may change a bit.

A nightly whose two legs are run alike proves little. What is varied is declared, drawn from a seed
that has nothing to do with the trajectory, recorded with the leg's environment as ambient, and
shown in the report.

    varied = draw_variation(seed, execution=spec.execution)
    varied.of(spec.execution)              # 2 engines instead of 1, other threads, another order
    varied.variables                       # TZ, LANG, PYTHONHASHSEED, ... of all its processes
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Literal, get_args

from pydantic import Field

from model_specs.base import Frozen
from model_specs.errors import SpecError
from model_specs.run_spec import ExecutionSpec

Varied = Literal[
    "temporary_folder",
    "host",
    "clock",
    "request_order",
    "engines",
    "hash_seed",
    "threads",
    "delays",
]
VARIED: tuple[Varied, ...] = get_args(Varied)

DELAYS_VARIABLE = "LOCKSTEP_DELAYS"
"""`SEED,MILLISECONDS`: read by `engines.delays` in every process of the leg."""

MAX_DELAY_MS = 10
"""Largest random delay before one forward of a rollout engine, or one reward."""

_ZONES = ("Asia/Kathmandu", "Pacific/Chatham", "America/St_Johns", "Antarctica/Troll")
"""Zones with odd offsets; one that is not installed is taken by libc as UTC under another name."""


class Variation(Frozen):
    """What differs from the first leg; the default varies nothing."""

    seed: int = 0
    """What everything here was drawn from."""
    temporary_folder: bool = False
    """A temporary folder of its own (TMPDIR), Ray's sockets and logs included."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the driver and of every process that it starts."""
    start_delay_s: float = 0.0
    """Waited before the leg begins, so that it meets other times of the same clock. The system's
    clock itself is not set: that needs rights which a run does not have."""
    request_order_seed: int | None = None
    rollout_engines: int | None = None
    threads: int | None = None

    def of(self, execution: ExecutionSpec) -> ExecutionSpec:
        """Return how the varied leg is executed."""
        changed = {
            name: value
            for name in ("request_order_seed", "rollout_engines", "threads")
            if (value := getattr(self, name)) is not None
        }
        return execution.model_copy(update=changed)

    def describe(self) -> tuple[tuple[str, str], ...]:
        """Return (what, value) for all that is varied, for people."""
        rows = [(name, value) for name, value in sorted(self.variables.items())]
        if self.temporary_folder:
            rows.append(("temporary folder", "of its own"))
        if self.start_delay_s:
            rows.append(("start", f"{self.start_delay_s:.1f} s later"))
        for name in ("request_order_seed", "rollout_engines", "threads"):
            if (value := getattr(self, name)) is not None:
                rows.append((name.replace("_", " "), str(value)))
        return tuple(rows)


def draw_variation(
    seed: int, *, execution: ExecutionSpec, what: Collection[str] = VARIED
) -> Variation:
    """Draw what a leg is run under.

    Args:
        seed: From outside the trajectory, such as `secrets.randbits(31)`.
        execution: How the first leg is executed.
        what: Names out of `VARIED`.

    Raises:
        SpecError: A name that is not one of them.
    """
    unknown = sorted(set(what) - set(VARIED))
    if unknown:
        raise SpecError(f"vary: {unknown[0]!r} is none of {', '.join(VARIED)}")
    draw = random.Random(f"lockstep variation {seed}")
    # All are drawn in one order, so that leaving one out does not change the others.
    zone, number = draw.choice(_ZONES), draw.randrange(1000)
    hash_seed, order_seed, delay_seed = (draw.randrange(2**31) for _ in range(3))
    start_delay_s = round(draw.uniform(0.5, 2.0), 1)
    variables: dict[str, str] = {}
    if "host" in what:
        variables |= {"HOSTNAME": f"varied-{number}", "LANG": "C"}
    if "clock" in what:
        variables["TZ"] = zone
    if "hash_seed" in what:
        variables["PYTHONHASHSEED"] = str(hash_seed)
    if "threads" in what:
        # Threads that spin while they wait would stand in the way of each other, and of engines.
        variables["OMP_WAIT_POLICY"] = "passive"
    if "delays" in what:
        variables[DELAYS_VARIABLE] = f"{delay_seed},{MAX_DELAY_MS}"
    return Variation(
        seed=seed,
        temporary_folder="temporary_folder" in what,
        variables=variables,
        start_delay_s=start_delay_s if "clock" in what else 0.0,
        request_order_seed=order_seed if "request_order" in what else None,
        rollout_engines=execution.rollout_engines + 1 if "engines" in what else None,
        threads=execution.threads + 1 if "threads" in what else None,
    )
