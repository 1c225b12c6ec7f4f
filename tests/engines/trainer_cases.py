"""What the tests of trainers share: specs, samples, model folders, starting, the stock model.

A test of a law that every trainer keeps takes the fixture `start`, which is parametrised by the
names of all trainers.
"""

from __future__ import annotations

import importlib
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.checkpoint.convert import convert_hf_to_dcp
from engines.checkpoint.export import unstacked_experts
from engines.checkpoint.tiny_model import write_tiny_model
from engines.contracts import TrainSample
from engines.train.fsdp2.model import model_config
from engines.train.megatron import parallel
from engines.train.registry import TRAINERS
from engines.train.shards import gathered, join
from engines.train.trainer import GrpoTrainer
from model_specs.model_spec import ModelSpec, MoeModelSpec, MoeSpec
from model_specs.recipes.tiny_cpu import TINY_MODEL
from model_specs.run_spec import (
    DataSpec,
    LossSpec,
    NumericsSpec,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    TreeReduction,
)

QWEN2 = TINY_MODEL
LLAMA = QWEN2.model_copy(
    update={"family": "llama", "qkv_bias": False, "tie_word_embeddings": False, "head_dim": 16}
)
QWEN3 = QWEN2.model_copy(update={"family": "qwen3", "qkv_bias": False, "qk_norm": True})
QWEN3_MOE = MoeModelSpec(
    **{**QWEN3.model_dump(), "family": "qwen3_moe"},
    moe=MoeSpec(num_experts=6, experts_per_token=2, intermediate_size=48, normalize_weights=True),
)
DTYPES = ("float32", "bfloat16")


def make_spec(
    dtype: str = "float32",
    *,
    model: ModelSpec = QWEN2,
    slots: int = 2,
    lr: float = 2e-3,
    **loss: Any,
) -> RunSpec:
    return RunSpec(
        recipe="test",
        model=model,
        data=DataSpec(source="generated:arithmetic", prompts_per_step=2, max_prompt_tokens=96),
        sampling=SamplingSpec(samples_per_prompt=4, max_new_tokens=24, temperature=0.7),
        reward=RewardSpec(name="digits"),
        loss=LossSpec.model_validate({"reference": True, **loss}),
        optimizer=OptimizerSpec(lr=lr, weight_decay=0.0, clip_grad=100.0),
        reduction=TreeReduction(slots=slots),
        numerics=NumericsSpec.model_validate({"compute_dtype": dtype}),
        plan=PlanSpec(num_steps=4, checkpoint_every=2),
    )


def made_samples(count: int = 8, *, seed: int = 0) -> list[TrainSample]:
    draw = random.Random(seed)
    return [
        TrainSample(
            request_id=f"1/train-{i // 4}/{i % 4}",
            prompt_token_ids=tuple(draw.randrange(100) for _ in range(draw.randrange(3, 90))),
            token_ids=tuple(draw.randrange(100) for _ in range(draw.randrange(1, 25))),
            advantage=draw.randrange(-4, 5) / 4 or 0.5,
        )
        for i in range(count)
    ]


def rewarded_samples(tokens: int, *, seed: int = 0) -> list[TrainSample]:
    """Whole groups of four samples until they have this many completion tokens.

    A share of a completion's ids, drawn for each sample, comes from the lower half of the
    vocabulary, and its advantage is that share's distance from its group's mean in standard
    deviations: as a reward does, it says something about the tokens.
    """
    draw = random.Random(seed)
    samples: list[TrainSample] = []
    while sum(len(sample.token_ids) for sample in samples) < tokens:
        shares = [draw.random() for _ in range(4)]
        mean, deviation = statistics.fmean(shares), statistics.pstdev(shares)
        group = len(samples) // 4
        samples += [
            TrainSample(
                request_id=f"1/train-{group}/{place}",
                prompt_token_ids=tuple(draw.randrange(100) for _ in range(draw.randrange(3, 33))),
                token_ids=tuple(
                    draw.randrange(50) + 50 * (draw.random() >= share)
                    for _ in range(draw.randrange(64, 193))
                ),
                advantage=(share - mean) / deviation,
            )
            for place, share in enumerate(shares)
        ]
    return samples


def write_model(folder: Path, model: ModelSpec) -> Path:
    """Write the tiny model as `hf` and its converted masters as `dcp`."""
    write_tiny_model(folder / "hf", model)
    convert_hf_to_dcp(folder / "hf", folder / "dcp", model)
    return folder


@contextmanager
def megatron_groups(folder: Path) -> Iterator[None]:
    """Megatron's parallel state as a trainer of one rank has it, without a trainer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
        join(f"file://{folder}/rendezvous", rank=0, world_size=1)
        parallel.start()
        yield
        parallel.stop()
        torch.distributed.destroy_process_group()


_rendezvous = count()


@contextmanager
def started(spec: RunSpec, folder: Path, scratch: Path) -> Iterator[GrpoTrainer]:
    """Start the trainer that `spec` names on one rank, and close it."""
    module, _, name = TRAINERS[spec.trainer].partition(":")
    trainer: GrpoTrainer = getattr(importlib.import_module(module), name)(
        spec.model_dump_json(),
        dcp_dir=str(folder / "dcp"),
        rank=0,
        world_size=1,
        rendezvous=f"file://{scratch}/rendezvous-{next(_rendezvous)}",
        threads=1,
    )
    try:
        yield trainer
    finally:
        trainer.close()


def current_weights(trainer: GrpoTrainer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return name -> whole master weight as a leaf of this dtype."""
    return {
        name: gathered(shard).to(dtype, copy=True).requires_grad_()
        for name, shard in trainer._shards.items()
    }


def stock_model(trainer: GrpoTrainer, dtype: torch.dtype) -> torch.nn.Module:
    """Return transformers' own eager model at the trainer's current weights."""
    config = model_config(trainer.spec.model)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the default takes no float64
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = current_weights(trainer, dtype)
    expected = dict(unstacked_experts(model.state_dict()))
    assert set(state) == set(expected) - ({"lm_head.weight"} - set(state))
    with torch.no_grad():
        for name, tensor in state.items():
            expected[name].copy_(tensor)  # a view into the model, of stacked experts too
    return model


def stock_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> gradient of a stock model, experts one by one; a missing one fails."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return dict(unstacked_experts(found))


def plain_loss(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    samples: list[TrainSample],
    trainer: GrpoTrainer,
    **options: Any,
) -> torch.Tensor:
    """The sum of `plain_losses`."""
    return torch.stack(list(plain_losses(logits_of, samples, trainer, **options))).sum()


def plain_losses(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    samples: list[TrainSample],
    trainer: GrpoTrainer,
    *,
    on_policy: bool = False,
    old: Mapping[str, Sequence[float]] | None = None,
    deciding: Mapping[str, Sequence[float]] | None = None,
) -> Iterator[torch.Tensor]:
    """Each sample's part of GRPO's loss over `logits_of` (ids [n] -> logits [n, V]).

    Old and reference log-probs are the trainer's, as data: they are the loss's inputs; `old`
    (request id -> log-probs) is for scores that it had earlier. On policy the old log-probs are the
    model's own, so that the ratio is 1. Where a ratio is clipped is decided by the model's own log-
    probs, or by `deciding`.
    """
    loss_spec, temperature = trainer.spec.loss, trainer.spec.sampling.temperature
    kept = [sample for sample in samples if not sample.masked]
    olds, references = old or trainer.scores(), trainer.reference_scores()
    for sample in kept:
        ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
        logits = logits_of(ids)[len(sample.prompt_token_ids) - 1 : -1] / temperature
        logs = torch.log_softmax(logits, -1)
        lp = logs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        before = torch.tensor(olds[sample.request_id], dtype=lp.dtype)
        ref = torch.tensor(references[sample.request_id], dtype=lp.dtype)
        ratio = (lp - (lp.detach() if on_policy else before)).exp()
        decided = ratio.detach()
        if deciding is not None:
            decided = (torch.tensor(deciding[sample.request_id], dtype=lp.dtype) - before).exp()
        bound = decided.clamp(1 - loss_spec.clip_low, 1 + loss_spec.clip_high)
        is_clipped = -sample.advantage * bound > -sample.advantage * decided
        policy = -sample.advantage * torch.where(is_clipped, bound, ratio)
        k3 = ((ref - lp).exp() - (ref - lp) - 1).clamp(-10, 10)
        kl = lp - ref if loss_spec.kl_type == "k1" else k3
        token = policy + loss_spec.kl_coef * kl - loss_spec.entropy_coef * entropy
        if loss_spec.aggregation == "per_token":
            yield token.sum() / sum(len(s.token_ids) for s in kept)
        else:
            yield token.mean() / len(kept)
