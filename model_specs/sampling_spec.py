"""How completions are drawn, and which function scores them."""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from model_specs.base import Execution, Frozen
from model_specs.json_text import JsonObject

SHIPPED_REWARDS: Final = ("digits", "gsm8k", "math")
"""Names of the rewards in `engines.rewards`."""


COLDEST: Final = 0.01
"""vLLM's smallest temperature above 0."""


class SamplingSpec(Frozen):
    """How completions are drawn."""

    samples_per_prompt: int = Field(ge=2)
    """GRPO's group size."""
    max_new_tokens: int = Field(ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    oversample: int = Field(default=1, ge=1)
    """Dynamic sampling: draw this many times `data.prompts_per_step` prompts a step, and train on
    the first groups, in data order, whose rewards are not all equal."""

    @model_validator(mode="after")
    def _can_be_drawn(self) -> SamplingSpec:
        if 0 < self.temperature < COLDEST:
            raise ValueError(
                f"temperature={self.temperature}: vLLM draws at {COLDEST} where it is asked for "
                "less; an evaluation may set 0, which takes the likeliest token"
            )
        if "" in self.stop:
            raise ValueError("stop has an empty text, which every completion contains")
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> SamplingSpec:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"sampling.min_new_tokens={self.min_new_tokens} is above "
                f"sampling.max_new_tokens={self.max_new_tokens}"
            )
        return self

    @property
    def keeps_whole_vocabulary(self) -> bool:
        """Whether no token is cut off, so that processed log-probs are the policy's own."""
        return self.top_p == 1.0 and self.top_k == -1


class RewardSpec(Frozen):
    """Which function scores a completion, with its declared options."""

    name: str
    """`digits`, `gsm8k`, `math`, or own code as `my_pkg.mod:function` or `FILE.py:function`."""
    source: Execution[str | None] = None
    """Own code: the file that was found for `name`; content is identity by `digest`."""
    digest: str | None = None
    """Own code: SHA-256 over its sources; None only until `resolve` has filled it in."""
    options: JsonObject = "{}"
    """Own code: what its function reads from `spec.options`."""
    low: float = 0.0
    """Smallest reward; a smaller one ends the run."""
    high: float = 1.0
    """Largest reward; a larger one ends the run."""
    timeout_s: Execution[float] = Field(default=60.0, gt=0)
    """A reward that takes longer ends the run; it never becomes a value."""
    format_credit: float = Field(default=0.0, ge=0, le=1)
    """gsm8k: credit for a well-formed final answer that is wrong."""

    @property
    def is_own_code(self) -> bool:
        """Whether the user's own function scores, and not one of `SHIPPED_REWARDS`."""
        return self.name not in SHIPPED_REWARDS

    @model_validator(mode="after")
    def _known_name(self) -> RewardSpec:
        module, colon, function = self.name.partition(":")
        if self.is_own_code and not (colon and module and function.isidentifier()):
            raise ValueError(
                f"unknown reward {self.name!r}; known rewards: {', '.join(SHIPPED_REWARDS)}; own "
                "code is named my_pkg.mod:function or FILE.py:function"
            )
        if self.format_credit and self.name != "gsm8k":
            raise ValueError(
                f"format_credit={self.format_credit} is read by the reward gsm8k alone, not by "
                f"{self.name}"
            )
        if self.options != "{}" and not self.is_own_code:
            raise ValueError(f"options={self.options} is read by own code alone, not {self.name}")
        if not self.low < self.high:
            raise ValueError(f"reward.low={self.low} is not below reward.high={self.high}")
        return self
