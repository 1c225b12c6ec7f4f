"""A trainer of the product in this process, on one GPU, with random weights and random samples.

For tools and tests that look into one; a run starts its trainers in processes of their own.

    with started(spec, scratch) as trainer:
        trainer.score(samples(spec, 16))
"""

from __future__ import annotations

import importlib
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engines.checkpoint.convert import convert_hf_to_dcp
from engines.contracts import TrainSample
from engines.train.registry import TRAINERS
from engines.train.trainer import GrpoTrainer
from model_specs.run_spec import RunSpec
from tools.gpu.shapes import write_random_model


@contextmanager
def started(spec: RunSpec, folder: Path) -> Iterator[GrpoTrainer]:
    """Start the trainer that `spec` names on one rank, and close it.

    Args:
        spec: Its `execution.device` decides where.
        folder: Where the random weights of this shape lie, or are written at first.
    """
    if not (folder / "dcp").is_dir():
        write_random_model(str(folder / "hf"), spec.model_dump_json())
        convert_hf_to_dcp(folder / "hf", folder / "dcp", spec.model)
    module, _, name = TRAINERS[spec.trainer].partition(":")
    trainer: GrpoTrainer = getattr(importlib.import_module(module), name)(
        spec.model_dump_json(),
        dcp_dir=str(folder / "dcp"),
        rank=0,
        world_size=1,
        rendezvous=f"file://{tempfile.mkdtemp()}/rendezvous-{time.time_ns()}",
    )
    try:
        yield trainer
    finally:
        trainer.close()
        del trainer
        torch.cuda.empty_cache()


def samples(
    spec: RunSpec, count: int, *, prompt: tuple[int, int] = (16, 300), seed: int = 0
) -> list[TrainSample]:
    """Return samples of random tokens, prompts of a random length, advantages of both signs."""
    source = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(source.randrange(4, spec.model.vocab_size) for _ in range(length))

    most = spec.sampling.max_new_tokens
    return [
        TrainSample(
            request_id=f"1/{index // 4}/{index % 4}",
            prompt_token_ids=tokens(source.randrange(*prompt)),
            token_ids=tokens(source.randrange(max(1, most // 2), most + 1)),
            advantage=source.choice((-1.0, -0.5, 0.5, 1.0)),
        )
        for index in range(count)
    ]
