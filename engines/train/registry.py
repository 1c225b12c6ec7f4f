"""The trainers by name, and the one table of what each of them can do.

A trainer is an import path: nothing registers itself, and the driver imports no torch. The table
has a row for each feature, layout, precision, reduction and family, and says for every trainer
whether it is supported, or why not. Invariant: a spec that asks for something that no row supports
is refused by that row's name before any process is started; nothing is ignored.

    check_supported(spec)                  # UnsupportedError names the row
    path = TRAINERS[spec.trainer]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from model_specs.errors import UnsupportedError
from model_specs.run_spec import NUMERICS_VERSION, RunSpec

TRAINERS: Mapping[str, str] = {
    "fsdp2": "engines.train.fsdp2.actor:Fsdp2Trainer",
    "megatron": "engines.train.megatron.actor:MegatronTrainer",
}
"""`RunSpec.trainer` -> import path of the class that every rank's process makes."""

BOTH: tuple[str, ...] = ("fsdp2", "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One row: what is asked for, who can do it, and why the others cannot."""

    name: str
    """As a refusal names it."""
    kind: Literal["family", "layout", "precision", "reduction", "feature"]
    asked: Callable[[RunSpec], Any]
    """Falsy where the spec does not ask for it; else what it says, for the message."""
    trainers: tuple[str, ...] = ()
    """Trainers that support it."""
    reason: str = ""
    """Why not, for those that do not."""
    remedy: str = ""


def _option(name: str, default: Any) -> Callable[[RunSpec], str]:
    """Return a question whether `trainer_options.<name>` has left its default."""

    def asked(spec: RunSpec) -> str:
        value = getattr(spec.trainer_options, name)
        return "" if value == default else f"trainer_options.{name}={value}"

    return asked


def _weight_sync(kind: str) -> Callable[[RunSpec], str]:
    def asked(spec: RunSpec) -> str:
        found = spec.trainer_options.weight_sync
        return f"trainer_options.weight_sync={found}" if found == kind else ""

    return asked


def _family(name: str) -> Callable[[RunSpec], str]:
    return lambda spec: f"model.family={name}" if spec.model.family == name else ""


def _compute_dtype(name: str) -> Callable[[RunSpec], str]:
    return lambda spec: (
        f"numerics.compute_dtype={name}" if spec.numerics.compute_dtype == name else ""
    )


def _reduction(kind: str) -> Callable[[RunSpec], str]:
    return lambda spec: f"reduction.kind={kind}" if spec.reduction.kind == kind else ""


def _policy(name: str, device: str) -> Callable[[RunSpec], str]:
    return lambda spec: (
        f"numerics.policy={name}, execution.device={device}"
        if (spec.numerics.policy, spec.execution.device) == (name, device)
        else ""
    )


def _flashinfer_on_cpu(spec: RunSpec) -> str:
    found = spec.numerics.rollout_attention
    is_asked = found == "flashinfer" and spec.execution.device == "cpu"
    return f"numerics.rollout_attention={found}, execution.device=cpu" if is_asked else ""


def _ranks(spec: RunSpec) -> str:
    ranks = spec.execution.trainer_ranks
    return f"execution.trainer_ranks={ranks}" if ranks > 1 else ""


CAPABILITIES: tuple[Capability, ...] = (
    Capability(name="family qwen2", kind="family", asked=_family("qwen2"), trainers=BOTH),
    Capability(name="family llama", kind="family", asked=_family("llama"), trainers=BOTH),
    Capability(name="family qwen3", kind="family", asked=_family("qwen3"), trainers=BOTH),
    Capability(name="family qwen3_moe", kind="family", asked=_family("qwen3_moe"), trainers=BOTH),
    Capability(
        name="precision float32", kind="precision", asked=_compute_dtype("float32"), trainers=BOTH
    ),
    Capability(
        name="precision bfloat16",
        kind="precision",
        asked=_compute_dtype("bfloat16"),
        trainers=BOTH,
    ),
    Capability(name="tree reduction", kind="reduction", asked=_reduction("tree"), trainers=BOTH),
    Capability(name="stock reduction", kind="reduction", asked=_reduction("stock"), trainers=BOTH),
    Capability(
        name="stock numerics",
        kind="feature",
        asked=_policy("stock", "cpu"),
        trainers=("fsdp2",),
        reason="Megatron's own layers need its tensor-parallel kernels, which CPU does not have",
        remedy="set trainer=fsdp2",
    ),
    Capability(
        name="stock numerics on CUDA",
        kind="feature",
        asked=_policy("stock", "cuda"),
        trainers=("fsdp2",),
        reason="Megatron's own layers have not been tried; only those on the shared ops have",
        remedy="set trainer=fsdp2",
    ),
    Capability(
        name="peer numerics",
        kind="feature",
        asked=_policy("peer", "cuda"),
        trainers=("fsdp2",),
        reason="Megatron's own layers have not been tried; only those on the shared ops have",
        remedy="set trainer=fsdp2",
    ),
    Capability(
        name="peer numerics on CPU",
        kind="feature",
        asked=_policy("peer", "cpu"),
        reason="FlashInfer, NCCL and cuBLAS, which it switches, do not exist there",
        remedy="set execution.device=cuda, or numerics=stock",
    ),
    Capability(
        name="FlashInfer attention on CPU",
        kind="feature",
        asked=_flashinfer_on_cpu,
        reason="FlashInfer's kernels are CUDA's",
        remedy="set numerics.rollout_attention=shared",
    ),
    Capability(name="data parallel", kind="layout", asked=_ranks, trainers=BOTH),
    Capability(
        name="tensor parallel",
        kind="layout",
        asked=_option("tensor_parallel", 1),
        reason="a split matrix product adds in an order that depends on the number of ranks",
        remedy="set trainer_options.tensor_parallel=1 and use execution.trainer_ranks",
    ),
    Capability(
        name="pipeline parallel",
        kind="layout",
        asked=_option("pipeline_parallel", 1),
        reason="no schedule is there that keeps a slot's order of additions",
        remedy="set trainer_options.pipeline_parallel=1 and use execution.trainer_ranks",
    ),
    Capability(
        name="context parallel",
        kind="layout",
        asked=_option("context_parallel", 1),
        reason="the shared attention needs all keys of a sequence on one rank",
        remedy="set trainer_options.context_parallel=1 and shorten the sequences",
    ),
    Capability(
        name="expert parallel",
        kind="layout",
        asked=_option("expert_parallel", 1),
        reason="it has not been shown that dispatching experts over ranks keeps the bits",
        remedy="set trainer_options.expert_parallel=1",
    ),
    Capability(
        name="gradient checkpointing",
        kind="feature",
        asked=_option("gradient_checkpointing", False),
        trainers=BOTH,
    ),
    Capability(
        name="bound on tokens",
        kind="feature",
        asked=_option("max_tokens_per_rank", None),
        trainers=BOTH,
    ),
    Capability(
        name="CPU offload",
        kind="feature",
        asked=_option("cpu_offload", False),
        reason="it has not been shown that offloading keeps the bits",
        remedy="set trainer_options.cpu_offload=false and use more ranks",
    ),
    Capability(
        name="critic",
        kind="feature",
        asked=_option("critic", False),
        reason="GRPO has no value model; PPO with a critic is not implemented",
        remedy="set trainer_options.critic=false",
    ),
    Capability(
        name="LoRA",
        kind="feature",
        asked=_option("lora", False),
        reason="adapters would be merged or applied by other ops in rollout and trainer; all "
        "weights are trained",
        remedy="set trainer_options.lora=false",
    ),
    Capability(
        name="asynchronous rollout",
        kind="feature",
        asked=_option("asynchronous", False),
        reason="samples would come from older weights than the trainer scores them at, so the "
        "two cannot be aligned",
        remedy="set trainer_options.asynchronous=false",
    ),
    Capability(
        name="multi-turn",
        kind="feature",
        asked=_option("multi_turn", False),
        reason="what a tool or an environment answers is no function of the seed, so a run could "
        "not be repeated",
        remedy="set trainer_options.multi_turn=false",
    ),
    Capability(
        name="supervised fine-tuning",
        kind="feature",
        asked=_option("supervised", False),
        reason="there is no rollout in it, and so nothing to align",
        remedy="fine-tune elsewhere and set model.path to the result",
    ),
    Capability(
        name="other trackers",
        kind="feature",
        asked=_option("tracker", "mlflow"),
        reason="MLflow is the one projection of the ledger that is kept complete and idempotent",
        remedy="send metrics.jsonl of the run folder to another tracker yourself",
    ),
    Capability(
        name="teacher distillation",
        kind="feature",
        asked=_option("teacher_distillation", False),
        reason="no teacher's log-probs enter the loss",
        remedy="set trainer_options.teacher_distillation=false",
    ),
    Capability(
        name="draft-model training",
        kind="feature",
        asked=_option("draft_model_training", False),
        reason="multi-token-prediction layers and draft models are neither trained nor sent",
        remedy="set trainer_options.draft_model_training=false",
    ),
    Capability(
        name="routing replay",
        kind="feature",
        asked=_option("routing_replay", False),
        reason="both engines share one router, so there is no mismatch to replay away",
        remedy="set trainer_options.routing_replay=false",
    ),
    Capability(
        name="multimodal",
        kind="feature",
        asked=_option("multimodal", False),
        reason="only text enters a prompt",
        remedy="set trainer_options.multimodal=false",
    ),
    Capability(
        name="quantised checkpoint",
        kind="feature",
        asked=_option("quantised_checkpoint", False),
        reason="weights are read and written as float32 or bfloat16 only",
        remedy="dequantise the weights first and set trainer_options.quantised_checkpoint=false",
    ),
    Capability(
        name="disk weight sync",
        kind="feature",
        asked=_weight_sync("disk"),
        reason="weights are pushed from process to process, where what is received is digested",
        remedy="set trainer_options.weight_sync=full",
    ),
    Capability(
        name="delta weight sync",
        kind="feature",
        asked=_weight_sync("delta"),
        reason="every push is a full set, so that a lost update cannot go unseen",
        remedy="set trainer_options.weight_sync=full",
    ),
    Capability(
        name="asynchronous save",
        kind="feature",
        asked=_option("async_save", False),
        reason="a checkpoint is read back and verified before training goes on",
        remedy="set trainer_options.async_save=false",
    ),
)
"""Every row; what a spec asks for is looked up here and nowhere else."""


def refusals(spec: RunSpec) -> list[str]:
    """Return one sentence for each row that the spec asks for and its trainer does not support."""
    found = []
    for row in CAPABILITIES:
        asked = row.asked(spec)
        if asked and spec.trainer not in row.trainers:
            able = ", ".join(row.trainers) or "no trainer"
            found.append(
                f"{row.name} ({asked}) is not supported by trainer {spec.trainer}: "
                f"{row.reason}; "
                f"supported by {able}; {row.remedy}"
            )
    return found


def check_supported(spec: RunSpec) -> None:
    """Require that the trainer of a spec can do all that the spec asks of it.

    Raises:
        UnsupportedError: Naming every row that is refused, with what was asked for and why.
    """
    found = refusals(spec)
    if spec.numerics.version != NUMERICS_VERSION:
        found.append(
            f"numerics.version={spec.numerics.version}: this code computes version "
            f"{NUMERICS_VERSION}, whose bits are others; go on with the code that made the run, or "
            "run it anew"
        )
    known = {row.asked(spec) for row in CAPABILITIES if row.kind == "family"}
    if known == {""}:
        families = ", ".join(row.name for row in CAPABILITIES if row.kind == "family")
        found.append(f"model.family={spec.model.family} is no row of the table ({families})")
    if found:
        raise UnsupportedError("; ".join(found))
