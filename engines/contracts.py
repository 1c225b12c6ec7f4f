"""The records that cross a process border, and what the two engines must be able to do.

Everything here is small, frozen and free of torch: the driver moves references and records, never
tensors. Log-probs are float32 values carried as Python floats, which hold them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

Probe = Literal[
    "prompts",
    "tokens",
    "rollout_logprobs",
    "rewards",
    "advantages",
    "train_logprobs",
    "loss",
    "grads",
    "grad_norm",
    "optimizer",
    "weights",
    "sent",
    "received",
]
PROBES: tuple[Probe, ...] = get_args(Probe)
"""What is digested at each update, in causal order: a first difference explains all later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRef:
    """A file or folder by place, kind and content."""

    uri: str
    kind: Literal[
        "model", "data", "evals", "prompts", "dcp", "checkpoint", "export", "ledger", "report"
    ]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One rendered and tokenised prompt."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    label: str
    metadata: str | None = None
    """What the reward is given beside the label, as canonical JSON; None for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """All prompts of a data set in file order, and what was left out."""

    prompts: tuple[Prompt, ...]
    num_dropped_too_long: int
    digest: str
    """Over ids, token ids, labels and metadata of all kept prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One completion to draw."""

    request_id: str
    """`<step>/<prompt id>/<sample index>`."""
    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion as the rollout engine drew it."""

    request_id: str
    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Sampled tokens; a sampled end-of-sequence token is the last of them and is scored."""
    logprobs: tuple[float, ...]
    """Log-prob of each of `token_ids` under the distribution that was sampled from (float32)."""
    text: str
    finish_reason: Literal["stop", "length"]
    stop_token: int | str | None = None
    forbidden_ids: tuple[int, ...] = ()
    """End-of-sequence ids that had no probability before position `forbidden_until`."""
    forbidden_until: int = 0
    """`sampling.min_new_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """What the trainer is given of a sample: in aligned mode never the rollout's log-probs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    advantage: float = 0.0
    """float32 value."""
    masked: bool = False
    """Left out of the loss (a truncated sample under `loss.mask_truncated`), still scored."""
    rollout_logprobs: tuple[float, ...] = ()
    """float32 values, the behaviour policy of `loss.tis_clip`; empty everywhere else."""
    forbidden_ids: tuple[int, ...] = ()
    forbidden_until: int = 0
    """As in `Sample`: the distribution that was drawn from is the one that is scored."""

    @classmethod
    def of(cls, sample: Sample, *, advantage: float = 0.0, masked: bool = False) -> TrainSample:
        """Return what the trainer may know of a sample."""
        return cls(
            request_id=sample.request_id,
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=sample.token_ids,
            advantage=advantage,
            masked=masked,
            forbidden_ids=sample.forbidden_ids,
            forbidden_until=sample.forbidden_until,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One bit of one live value to be flipped, on purpose."""

    step: int
    probe: Probe
    name: str | None = None
    """Tensor or sample; None takes the first in sorted order."""
    element: int = 0
    bit: int = 0
    """0 is the lowest bit of the element's storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What one optimizer step left behind, as digests and numbers."""

    digests: Mapping[str, Mapping[str, str]]
    """Probe -> name -> digest, for loss, grads, grad_norm, optimizer, weights."""
    metrics: Mapping[str, float]
    """train/{loss,pg_loss,kl,ppo_kl,pg_clipfrac,entropy,grad_norm,lr,...}."""
    changed_weights: int
    """Number of tensors whose digest changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One update of one step as it goes into the ledger."""

    step: int
    update: int
    """0-based within the step; -1 for line 0 (initial weights and first push, step 0)."""
    digests: Mapping[str, Mapping[str, str]]
    """Probe -> name -> digest; only the probes that this update has."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[Mapping[str, Any], ...] = ()
    """Rows of the samples table; on the first update of a step."""
    violations: tuple[str, ...] = ()
    """Required equalities that did not hold: `gate: ...`, `sent != received: ...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentResult:
    """What `train_segment` returns."""

    start_step: int
    end_step: int
    state_digest: str
    chain_digest: str
    stopped_by: str | None
    """The violation that ended the segment early, if any."""


class RolloutEngine(Protocol):
    """Draws completions. Implemented by `engines.rollout.group.RolloutGroup`."""

    def generate(self, requests: Sequence[SampleRequest]) -> tuple[Sample, ...]:
        """Draw one sample a request, in the order of `requests`, not in that of completion."""

    def receive(
        self,
        buckets: Sequence[Any],
        *,
        version: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> Mapping[str, str]:
        """Take all weights, drop the prefix cache, return name -> digest of what is stored.

        `keep_to` is a folder for `received.safetensors`.
        """


class Trainer(Protocol):
    """Scores and updates. Implemented by `engines.train.group.TrainerGroup`."""

    def score(self, samples: Sequence[TrainSample], *, flip: Flip | None = None) -> str:
        """Score all samples at the current weights; return only the log-probs' root digest."""

    def scores(self) -> Mapping[str, tuple[float, ...]]:
        """Reveal request id -> log-probs of the last `score`."""

    def update(
        self,
        samples: Sequence[TrainSample],
        *,
        step: int,
        update: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> UpdateRecord:
        """One optimizer step on these samples; `keep_to` is a folder for `<probe>.safetensors`."""

    def send(
        self, *, version: int, flip: Flip | None = None, keep_to: str | None = None
    ) -> tuple[Sequence[Any], Mapping[str, str]]:
        """Cast to the wire dtype, for no engine; return references to buckets, name -> digest."""

    def push(
        self,
        rollout: Any,
        *,
        version: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Send all weights to a connected `RolloutEngine`; return name -> digest, twice.

        First of what was sent, then of what the engine holds.
        """

    def weight_digests(self) -> Mapping[str, str]:
        """Name -> digest of the float32 masters."""
