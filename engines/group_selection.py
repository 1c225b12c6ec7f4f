"""Dynamic sampling: which of the drawn groups are trained on.

A step draws `sampling.oversample` times as many prompts as it trains on, and groups whose rewards
are all equal, which teach nothing, are left out (DAPO, arXiv 2503.14476, section 3.2). Invariant:
the choice is a function of the rewards in data order alone, so that neither the order of requests
nor that of completion, nor how long a reward takes, can be seen in it. Nothing is drawn again: the
number of drawn groups is fixed by the spec, so that data order stays a function of the step.

    selection = select_groups(groups, wanted=spec.data.prompts_per_step)
    trained = [groups[index] for index in selection.kept]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model_specs.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The groups that a step trains on."""

    kept: tuple[int, ...]
    """Indices of drawn groups, ascending: data order."""
    num_drawn: int
    num_with_variance: int
    """Drawn groups whose rewards are not all equal, kept or not."""
    num_filled: int
    """Kept groups without variance: there were not enough others."""

    def samples(self, group_size: int) -> tuple[int, ...]:
        """Indices of the kept groups' samples, where samples stand group by group."""
        return tuple(
            group * group_size + index for group in self.kept for index in range(group_size)
        )

    def metrics(self) -> dict[str, float]:
        """Counts of this step, for looking at."""
        return {
            "sampling/drawn_groups": float(self.num_drawn),
            "sampling/unused_groups": float(self.num_drawn - len(self.kept)),
            "sampling/filled_groups": float(self.num_filled),
        }


def select_groups(rewards: Sequence[Sequence[float]], *, wanted: int) -> Selection:
    """Keep the first `wanted` groups with reward variance, in data order.

    Where there are fewer, the first groups without variance fill up, and are counted: the size of
    an update is fixed by the spec.

    Args:
        rewards: Per drawn prompt, in data order, the rewards of its samples.
        wanted: How many groups the step trains on.

    Raises:
        EngineError: Fewer groups were drawn than are wanted.
    """
    if len(rewards) < wanted:
        raise EngineError(f"{len(rewards)} groups were drawn, but {wanted} are to be trained on")
    varied = [index for index, group in enumerate(rewards) if min(group) != max(group)]
    chosen = varied[:wanted]
    equal = [index for index, group in enumerate(rewards) if min(group) == max(group)]
    filled = equal[: wanted - len(chosen)]
    return Selection(
        kept=tuple(sorted((*chosen, *filled))),
        num_drawn=len(rewards),
        num_with_variance=len(varied),
        num_filled=len(filled),
    )
