"""What can be asked of a trainer by `trainer_options`: typed, and refused by name where not there.

Each field is a feature that other systems have under a name that people know. A value other than
the default is checked against the capability table (`engines.train.registry`) before anything
starts, and an unknown option is refused by the model itself: nothing is dropped. None of the
options that are supported decides a bit, so the group is `Execution` in the RunSpec.

    lockstep run tiny_cpu --set trainer=megatron --set trainer_options.gradient_checkpointing=true
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from model_specs.base import Frozen


class TrainerOptions(Frozen):
    """Options of whichever trainer the spec names."""

    gradient_checkpointing: bool = False
    """Keep only each decoder layer's input and run its forward again in backward: same bits."""
    max_tokens_per_rank: int | None = Field(default=None, ge=64)
    """Most rows (tokens and padding to 64) that a rank runs at once; None has no bound.

    A score is cut into as many forwards as it takes, and a slot into micro-batches in the order of
    its samples. Its gradient stays one float32 sum, rounded once: same bits, for one more float32
    copy of the weights while a slot is cut.
    """
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share one matrix product."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that share the layers."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share one sequence."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts."""
    cpu_offload: bool = False
    """Keep masters and optimizer state on the host."""
    critic: bool = False
    """Train a value model beside the policy."""
    teacher_distillation: bool = False
    """On-policy distillation from a teacher's log-probs."""
    draft_model_training: bool = False
    """Train multi-token-prediction layers or a draft model."""
    routing_replay: bool = False
    """Replay the rollout's expert choices in the trainer."""
    lora: bool = False
    """Train low-rank adapters instead of all weights."""
    asynchronous: bool = False
    """Draw the samples of the next step while this one is trained on."""
    multi_turn: bool = False
    """Conversations with tools or an environment between the turns."""
    supervised: bool = False
    """Supervised fine-tuning on given completions."""
    tracker: Literal["mlflow", "wandb", "tensorboard", "swanlab"] = "mlflow"
    """Where metrics are shown."""
    multimodal: bool = False
    """Inputs other than text."""
    quantised_checkpoint: bool = False
    """Start from, or write, weights below 16 bits."""
    weight_sync: Literal["full", "disk", "delta"] = "full"
    """How weights reach the rollout engines; `full`: all tensors, bucket by bucket, by
    `execution.transport`."""
    async_save: bool = False
    """Go on training while a checkpoint is being written."""
