"""What a run is: `RunSpec`, in trajectory, plan and execution parts.

The *trajectory* decides the bits of step k; the *plan* decides how many steps there are and what is
checked between them; *execution* decides where it happens and must never decide a bit. Two runs are
comparable when their trajectories are equal; runs of unequal length on their common prefix.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from model_specs.base import Execution, Frozen
from model_specs.data_spec import DATA_SUFFIXES
from model_specs.data_spec import DataSpec as DataSpec
from model_specs.errors import SpecError
from model_specs.model_spec import AnyModelSpec
from model_specs.plan_spec import EvalSampling as EvalSampling
from model_specs.plan_spec import EvalSet as EvalSet
from model_specs.plan_spec import GatePlan as GatePlan
from model_specs.plan_spec import PlanSpec as PlanSpec
from model_specs.sampling_spec import SHIPPED_REWARDS as SHIPPED_REWARDS
from model_specs.sampling_spec import RewardSpec as RewardSpec
from model_specs.sampling_spec import SamplingSpec as SamplingSpec
from model_specs.schedules import WeightDecaySchedule, WsdSchedule
from model_specs.trainer_options import TrainerOptions

SCHEMA_VERSION: Final = 1
NUMERICS_VERSION = 1
"""Raised by every change that alters bits; see the Numerics section of CHANGELOG.md."""


class LossSpec(Frozen):
    """GRPO's loss."""

    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.28, ge=0)
    kl_coef: float = Field(default=0.0, ge=0)
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    reference: bool = False
    """Hold a reference model (the initial weights) and report KL to it even at coefficient 0."""
    aggregation: Literal["per_token", "per_sample"] = "per_token"
    """`per_token`: sum over tokens / tokens of the update; `per_sample`: mean of sample means."""
    advantage_eps: float = Field(default=1e-6, gt=0)
    normalize_std: bool = True
    advantage_transform: Literal["none", "shuffled", "sign_flipped"] = "none"
    """The two controls of the learning test: with either, nothing useful can be learned."""
    mask_truncated: bool = False
    tis_clip: float | None = Field(default=None, gt=0)
    """numerics.policy other than aligned: truncated importance sampling, each policy loss times
    min(exp(trainer's log-prob - rollout's), tis_clip); None corrects nothing."""
    updates_per_step: int = Field(default=1, ge=1)


class OptimizerSpec(Frozen):
    """AdamW with Megatron's no-decay grouping (1-D parameters and biases are not decayed)."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: Annotated[float, Field(ge=0)] | WeightDecaySchedule = 0.1
    """Decoupled, multiplied by the learning rate; or a schedule of it."""
    clip_grad: float = Field(default=1.0, gt=0)


class ScheduleSpec(Frozen):
    """Learning rate against the number of samples consumed."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_samples: int = Field(default=0, ge=0)
    horizon_samples: int = Field(default=0, ge=0)
    """Where decay ends; unused by `constant`. Identity, so that a run can be extended."""
    min_lr: float = Field(default=0.0, ge=0)


class TreeReduction(Frozen):
    """Slots are added by a balanced binary tree: the bits do not depend on the number of ranks."""

    kind: Literal["tree"] = "tree"
    slots: int = Field(ge=1)
    """Slots of one update; a power of two that the number of ranks divides."""

    @model_validator(mode="after")
    def _power_of_two(self) -> TreeReduction:
        if self.slots & (self.slots - 1):
            raise ValueError(f"slots must be a power of two, not {self.slots}")
        return self


class StockReduction(Frozen):
    """The collective library's own reduction: the world size decides bits, so it is identity."""

    kind: Literal["stock"] = "stock"
    slots: int = Field(ge=1)
    world_size: int = Field(ge=1)


UNALIGNED_GATES: Final[dict[str, tuple[str, ...]]] = {
    "logprobs": ("report", "off"),
    "preflight": ("optional", "off"),
    "layerwise": ("off",),
    "controls": ("off",),
}
"""Gate -> what it may be where `numerics.policy` is not aligned, the most telling first."""


class NumericsSpec(Frozen):
    """Which arithmetic both engines run."""

    policy: Literal["aligned", "stock", "peer"] = "aligned"
    """`aligned`: the shared ops under both engines. `stock`: transformers' and vLLM's own ops, for
    comparison; no alignment is claimed. `peer`: the same with the switches of the public reference
    runs (FlashInfer attention, NCCL Ring, cuBLAS :4096:8); CUDA only. `--set numerics=stock` sets
    the gates with it."""
    rollout_attention: Literal["shared", "flashinfer"] = "shared"
    """policy=aligned on CUDA: FlashInfer's attention in the rollout instead of the shared one; the
    probes decide whether a run may go on with it."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of activations, of the compute copy of the weights, and of the wire."""
    version: int = NUMERICS_VERSION


class SeedSpec(Frozen):
    """The one root that every draw is derived from."""

    root: int = Field(default=1234, ge=0)


class FilterSpec(Frozen):
    """Keep the prompts whose pass rate, at the initial weights, lies in a band."""

    low: float = Field(ge=0, le=1)
    """Smallest pass rate that is kept."""
    high: float = Field(ge=0, le=1)
    """Largest pass rate that is kept."""
    samples_per_prompt: int = Field(default=8, ge=1)
    threshold: float = 1.0
    """A sample passes when its reward is at least this."""
    candidates: int | None = Field(default=None, ge=1)
    """Look at the first prompts of the data only, this many; None looks at all."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Keep the first prompts in the band only, this many; None keeps all of them."""
    kept_ids: Execution[tuple[str, ...]] = ()
    """What was kept, in data order; filled in by the filter stage, a result and no choice."""
    kept_digest: Execution[str | None] = None
    """Digest of `kept_ids` and of what was drawn for all candidates; filled in with it, and
    required to be found again."""

    @model_validator(mode="after")
    def _is_a_band(self) -> FilterSpec:
        if self.low > self.high:
            raise ValueError(f"filter.low={self.low} is above filter.high={self.high}")
        if bool(self.kept_ids) != (self.kept_digest is not None):
            raise ValueError("filter.kept_ids and filter.kept_digest belong together")
        return self


class ExecutionSpec(Frozen):
    """Where and how fast; recorded as ambient, never compared."""

    device: Literal["cpu", "cuda"] = "cpu"
    gpu_is_shared: bool = False
    """Other programs use the GPUs too: a stage does not wait for their memory to be free."""
    trainer_ranks: int = Field(default=1, ge=1)
    rollout_engines: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    """Threads of each engine process."""
    request_order_seed: int | None = None
    """Shuffle the order in which requests reach the engines (no bit may change); None keeps it."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Most sequences a rollout engine runs at once."""
    kv_cache_mib: int = Field(default=64, ge=1)
    bucket_mib: int = Field(default=64, ge=1)
    """Size of one bucket of a weight push."""
    object_store_mib: int = Field(default=512, ge=80)
    call_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest that one call of an engine may take: its start, a draw, an update, a checkpoint."""
    placement: Literal["colocated", "separate"] = "colocated"
    """On CUDA. `colocated`: rank r and engine r share GPU r. `separate`: the ranks have the first
    GPUs, in the order of node and PCI bus id, and the engines the next ones."""
    transport: Literal["host", "cuda_ipc", "nccl"] = "host"
    """How weights reach the engines: through host memory, memory of a GPU that both sides map
    (`colocated`), or a broadcast between GPUs (`separate`). On CPU: the object store, shared memory
    and gloo."""
    sleep: Literal[0, 1, 2] = 0
    """0: nobody sleeps. 1: trainer and engines give their memory up to each other; weights go to
    the host. 2: the engines discard their weights, which the next push brings."""

    @model_validator(mode="after")
    def _transport_fits(self) -> ExecutionSpec:
        if self.transport == "cuda_ipc" and self.placement == "separate":
            raise SpecError(
                "execution.transport=cuda_ipc maps memory of one GPU, and execution.placement="
                "separate puts trainer and engines on different ones; set execution.transport=nccl"
            )
        if (self.transport, self.placement, self.device) == ("nccl", "colocated", "cuda"):
            raise SpecError(
                "execution.transport=nccl needs a GPU of its own for every process, and "
                "execution.placement=colocated shares them; set execution.transport=cuda_ipc, or "
                "execution.placement=separate"
            )
        return self


class ForkOrigin(Frozen):
    """The state that a fork begins with, and where it was taken from."""

    step: int = Field(ge=1)
    """The fork's first step is the next one."""
    state_digest: str
    """Digest of weights, optimizer state and progress."""
    run: Execution[str]
    """Name of the parent run; the parent's own origin is in its spec."""
    leg: Execution[str]
    chain_digest: Execution[str]
    """The parent's ledger at that step."""
    checkpoint: Execution[str]
    """Folder that the state was copied from."""


class RunSpec(Frozen):
    """Everything that is needed to run again bit for bit."""

    schema_version: Literal[1] = SCHEMA_VERSION
    recipe: Execution[str]
    """Name of the recipe this spec was made from; a label."""
    recipe_digest: Execution[str | None] = None
    """Own recipe: SHA-256 over its sources, for the record; what it returned is the identity."""
    model: AnyModelSpec
    data: DataSpec
    filter: FilterSpec | None = None
    """Which prompts of the data are used; None uses all."""
    sampling: SamplingSpec
    reward: RewardSpec
    loss: LossSpec = LossSpec()
    optimizer: OptimizerSpec
    schedule: ScheduleSpec | WsdSchedule = Field(default=ScheduleSpec(), discriminator="kind")
    reduction: TreeReduction | StockReduction = Field(discriminator="kind")
    numerics: NumericsSpec = NumericsSpec()
    trainer: Literal["fsdp2", "megatron"] = "fsdp2"
    trainer_options: Execution[TrainerOptions] = TrainerOptions()
    """None that is supported decides a bit; the others are refused before anything starts."""
    seeds: SeedSpec = SeedSpec()
    origin: ForkOrigin | None = None
    """None for a run that begins with the model's own weights."""
    plan: PlanSpec
    execution: Execution[ExecutionSpec] = ExecutionSpec()

    @property
    def prompts_drawn_per_step(self) -> int:
        """Prompts of one rollout; `data.prompts_per_step` of them are trained on."""
        return self.data.prompts_per_step * self.sampling.oversample

    @property
    def samples_per_step(self) -> int:
        """Samples of one step that are trained on."""
        return self.data.prompts_per_step * self.sampling.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        """Samples of one optimizer step."""
        return self.samples_per_step // self.loss.updates_per_step

    @property
    def start_step(self) -> int:
        """Step that the run's first step comes after: 0, or that of a fork's origin."""
        return 0 if self.origin is None else self.origin.step

    def eval_reward(self, chosen: EvalSet) -> RewardSpec:
        """The reward of an evaluation."""
        return chosen.reward or self.reward

    @model_validator(mode="after")
    def _parts_fit(self) -> RunSpec:
        slots = self.reduction.slots
        if self.samples_per_step % self.loss.updates_per_step:
            raise SpecError(
                f"loss.updates_per_step={self.loss.updates_per_step} does not divide the "
                f"{self.samples_per_step} samples of a step"
            )
        if self.samples_per_update % slots:
            raise SpecError(
                f"reduction.slots={slots} does not divide the {self.samples_per_update} samples "
                "of an update; choose a power of two that does"
            )
        if slots % self.execution.trainer_ranks:
            raise SpecError(
                f"execution.trainer_ranks={self.execution.trainer_ranks} does not divide "
                f"reduction.slots={slots}"
            )
        stock = self.reduction if isinstance(self.reduction, StockReduction) else None
        if stock is not None and stock.world_size != self.execution.trainer_ranks:
            raise SpecError(
                f"reduction.world_size={stock.world_size} decides the bits of a stock reduction, "
                f"but execution.trainer_ranks={self.execution.trainer_ranks}; set both alike"
            )
        self._check_schedule()
        self._check_lengths()
        if self.numerics.rollout_attention != "shared" and self.plan.gates.preflight == "off":
            raise SpecError(
                f"numerics.rollout_attention={self.numerics.rollout_attention} is an option that "
                "only the probes can allow; set plan.gates.preflight=required"
            )
        if not self.sampling.keeps_whole_vocabulary and self.plan.gates.logprobs != "off":
            raise SpecError(
                f"sampling.top_p={self.sampling.top_p}, top_k={self.sampling.top_k} cut the "
                "vocabulary, so processed log-probs are renormalised over the kept tokens and the "
                "log-prob gate cannot hold; set top_p=1, top_k=-1, or plan.gates.logprobs=off"
            )
        if self.plan.num_steps <= self.start_step:
            raise SpecError(
                f"plan.num_steps={self.plan.num_steps}, but the run begins after step "
                f"{self.start_step}; set plan.num_steps to a later one"
            )
        self._check_evals()
        if self.numerics.policy != "aligned":
            self._check_unaligned()
        elif self.loss.tis_clip is not None:
            raise SpecError(
                f"loss.tis_clip={self.loss.tis_clip} corrects a mismatch between trainer and "
                "rollout, and numerics.policy=aligned has none: every weight would be exactly 1, "
                "and a bug would be hidden; leave it out, or set numerics=stock"
            )
        if self.loss.kl_coef and not self.loss.reference:
            raise SpecError(
                f"loss.kl_coef={self.loss.kl_coef} needs loss.reference=true (a reference model)"
            )
        return self

    def _check_schedule(self) -> None:
        schedule, rate = self.schedule, self.optimizer.lr
        if schedule.min_lr > rate:
            raise SpecError(
                f"schedule.min_lr={schedule.min_lr} is above optimizer.lr={rate}, so the rate "
                "would rise where it decays"
            )
        if schedule.kind != "constant" and schedule.horizon_samples <= schedule.warmup_samples:
            raise SpecError(
                f"schedule.kind={schedule.kind} decays until horizon_samples="
                f"{schedule.horizon_samples}, which is not after warmup_samples="
                f"{schedule.warmup_samples}: the rate would be {schedule.min_lr} at once; set "
                "schedule.horizon_samples"
            )

    def _check_lengths(self) -> None:
        new_tokens, positions = self.sampling.max_new_tokens, self.model.max_position_embeddings
        if new_tokens >= positions:
            raise SpecError(
                f"sampling.max_new_tokens={new_tokens} leaves no room for a prompt in the "
                f"{positions} positions of the model"
            )

    def _check_evals(self) -> None:
        for chosen in self.plan.evals:
            chosen.data_of(self.data)
            source = self.data.source if chosen.source is None else chosen.source
            is_same_file = source == self.data.source and source.endswith(DATA_SUFFIXES)
            if is_same_file and chosen.rows is None:
                raise SpecError(
                    f"plan.evals: {chosen.name} would be evaluated on the training file itself, "
                    f"data.source={source}; name another by source, or its rows by rows"
                )

    def _check_unaligned(self) -> None:
        """Refuse what only aligned engines can promise."""
        gates = {
            f"plan.gates.{name}": (getattr(self.plan.gates, name), allowed)
            for name, allowed in UNALIGNED_GATES.items()
        }
        wanted: dict[str, tuple[object, tuple[object, ...]]] = {
            **gates,
            "trainer_options.max_tokens_per_rank": (
                self.trainer_options.max_tokens_per_rank,
                (None,),
            ),
            "trainer_options.gradient_checkpointing": (
                self.trainer_options.gradient_checkpointing,
                (False,),
            ),
            "numerics.rollout_attention": (self.numerics.rollout_attention, ("shared",)),
        }
        wrong = [
            f"{name}={found} (choose {' or '.join(map(str, allowed))})"
            for name, (found, allowed) in wanted.items()
            if found not in allowed
        ]
        if wrong:
            policy = self.numerics.policy
            raise SpecError(
                f"numerics.policy={policy} runs other ops in trainer and rollout, so nothing can "
                "be promised about their log-probs; this does not go with it: "
                f"{'; '.join(wrong)}; --set numerics={policy} chooses for the gates"
            )
