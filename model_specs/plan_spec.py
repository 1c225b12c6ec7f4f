"""How far a run goes and what is checked on the way: gates, evaluations, checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from model_specs.base import Execution, Frozen
from model_specs.data_spec import DataSpec, without_rows_in_source
from model_specs.sampling_spec import RewardSpec, SamplingSpec


class GatePlan(Frozen):
    """Which gates a run must pass."""

    preflight: Literal["required", "optional", "off"] = "required"
    logprobs: Literal["required", "optional", "report", "off"] = "required"
    """Measured at each step and shown. `required`: one difference is red. `optional`: none is, and
    alignment is claimed where there is none; `report` and `off`: it is never claimed. A NaN and a
    request that cannot be compared are red in any mode."""
    layerwise: Literal["required", "optional", "off"] = "required"
    """After training: hidden states of every decoder layer of both engines, every element."""
    controls: Literal["required", "optional", "off"] = "required"
    """Beside the 0.0: native vLLM ops must be Misaligned, stock transformers must be near."""
    stop_on_red: bool = True
    """End the segment after the first step whose required gate is red."""
    stock_band_float32: float = Field(default=1e-5, gt=0)
    """fp32: largest difference allowed between vLLM on our ops and stock transformers."""


class EvalSampling(SamplingSpec):
    """How an evaluation draws; temperature 0 takes the likeliest token."""

    samples_per_prompt: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _greedy_draws_once(self) -> EvalSampling:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt} at temperature 0 would draw the "
                "same completion again and again; set it to 1, or a temperature above 0"
            )
        if self.oversample != 1:
            raise ValueError(
                f"oversample={self.oversample} is for training, where groups are chosen; an "
                "evaluation counts every prompt"
            )
        return self


class EvalSet(Frozen):
    """Prompts on which the policy is evaluated during training; never a bit of a step.

    A row is read and rendered as the run's own prompts are: format, keys, template, system prompt
    and chat template are those of `data`, unless they are set here. Duplicates are kept.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """Stands in the names of the metrics, `eval/<name>/accuracy`."""
    source: Execution[str | None] = None
    """As `data.source`; None takes the run's own. `PATH@[a:b]` is read as for `data.source`."""
    split: str = "test"
    rows: str | None = None
    """As `data.rows`."""
    digest: str | None = None
    """SHA-256 of the file's bytes; None only until download has filled it in."""
    format: Literal["messages", "prompt", "gsm8k"] | None = None
    """None takes the run's format with its keys."""
    prompt_key: str | None = None
    messages_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    template: str | None = None
    limit: int | None = Field(default=None, ge=1)
    """Only this many prompts, the first in file order."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """None takes the run's; longer prompts are dropped and counted."""
    sampling: EvalSampling
    reward: RewardSpec | None = None
    """None takes the run's."""
    correct_at: float | None = None
    """A completion with this reward or more is correct; None takes the reward's `high`."""
    every: int = Field(ge=1)
    """After every step that this divides."""
    before_training: bool = True
    """Also before the first update."""

    @model_validator(mode="before")
    @classmethod
    def _split_rows_off_source(cls, values: Any) -> Any:
        return without_rows_in_source(values, "plan.evals")

    @model_validator(mode="after")
    def _keys_come_with_a_format(self) -> EvalSet:
        keys = ("prompt_key", "messages_key", "label_key", "metadata_key")
        given = [name for name in keys if getattr(self, name) is not None]
        if given and self.format is None:
            raise ValueError(
                f"{self.name}: {given[0]}={getattr(self, given[0])!r} is read with a format of the "
                "set's own, but format=None; set format"
            )
        return self

    def is_due(self, step: int) -> bool:
        """Whether the set is evaluated after `step` (from 1)."""
        return step % self.every == 0

    def data_of(self, data: DataSpec) -> DataSpec:
        """Return how this set is read, in a run whose own prompts are `data`."""
        own: dict[str, Any] = {
            "source": self.source or data.source,
            "split": self.split,
            "rows": self.rows,
            "digest": self.digest,
            "prompt_ids": (),
            "duplicates": "keep",
            "too_long": "drop",
            "max_prompt_tokens": self.max_prompt_tokens or data.max_prompt_tokens,
        }
        if self.format is not None:
            names = ("format", "prompt_key", "messages_key", "label_key", "metadata_key")
            own |= {name: getattr(self, name) for name in names}
        if self.template is not None:
            own["template"] = self.template
        return DataSpec.model_validate({**data.model_dump(), **own})


class PlanSpec(Frozen):
    """How far the run goes and what is checked; never the bits of a step."""

    num_steps: int = Field(ge=1)
    checkpoint_every: int = Field(ge=1)
    keep_last: int | None = Field(default=None, ge=1)
    """Keep this many newest checkpoints and delete older ones; None keeps all."""
    keep_every: int | None = Field(default=None, ge=1)
    """With `keep_last`: never delete the checkpoint of a step that this divides."""
    keep_tensor_steps: int = Field(default=0, ge=0)
    """Keep the tensors of this many last steps, so that a diff can name element and values.

    A ring: each step's are written, and those of older steps deleted."""
    dump_rollouts: bool = False
    """Write each step's rollout with all that its updates need, to train from it alone."""
    evals: tuple[EvalSet, ...] = ()
    gates: GatePlan = GatePlan()

    @model_validator(mode="after")
    def _parts_of_the_plan_fit(self) -> PlanSpec:
        names = [chosen.name for chosen in self.evals]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"plan.evals has two sets of the name {twice[0]!r}")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(
                f"plan.keep_every={self.keep_every} says what is never deleted, but nothing is "
                "deleted while plan.keep_last=None; set plan.keep_last too"
            )
        return self
