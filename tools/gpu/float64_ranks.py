"""One float32 step on several ranks against float64: the norm of the gradient, within 1e-6.

The reference is that of `tools.gpu.float64_replay`: plain PyTorch, unpacked, one sample at a time,
on one device, with nothing of the trainers in it.

    figures = compare(Path("scratch"), device="cuda")
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.cluster import gather
from engines.contracts import TrainSample
from model_specs.run_spec import RunSpec
from tools.gpu.legs import World, processes, start_trainer

BOUND = 1e-6
"""Of the relative difference of the norms; written before it was measured."""


def compare(scratch: Path, *, device: str, ranks: int = 2) -> dict[str, Any]:
    """Take one float32 step of the 0.5B shape (CPU: the tiny one) and compare its norm."""
    shape = "tiny_cpu" if device == "cpu" else "gsm8k_qwen2_5_0_5b"
    world = World.make(shape=shape, device=device, folder=scratch / f"float64-{shape}")
    parts = {
        "numerics": {"compute_dtype": "float32"},
        "loss": {"kl_coef": 0.0, "reference": False},
        "trainer_options": {"gradient_checkpointing": device == "cuda"},
    }
    spec = world.spec(parts=parts, trainer_ranks=ranks)
    samples = made_samples(spec)
    with processes(world, spec, name="float64", with_engines=False) as started:
        trainer = start_trainer(world, spec, started.trainers)
        trainer.score(samples)
        record = trainer.update(samples, step=1, update=0)
        ours = record.metrics["train/grad_norm"]
        trainer.close()
        asked = started.trainers[0].run(
            "tools.gpu.float64_ranks:true_norm", spec.model_dump_json(), world.masters, samples
        )
        (true,) = gather([asked], what="float64 reference")
    difference = abs(ours / true["of the model's angles"] - 1)
    return {
        "shape": shape,
        "ranks": ranks,
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "norm float32": ours,
        "norm float64": true,
        "relative difference": difference,
        "relative difference to exact angles": abs(ours / true["of exact angles"] - 1),
        "bound": BOUND,
        "holds": difference < BOUND,
    }


def made_samples(spec: RunSpec) -> list[TrainSample]:
    """Return an update's samples: random tokens, advantages +1 and -1 in turn."""
    draw = random.Random(0)
    limit = min(200, spec.data.max_prompt_tokens)
    return [
        TrainSample(
            request_id=f"1/{index}",
            prompt_token_ids=_tokens(draw, draw.randrange(8, limit), spec),
            token_ids=_tokens(draw, draw.randrange(8, spec.sampling.max_new_tokens + 1), spec),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index in range(spec.samples_per_update)
    ]


def _tokens(draw: random.Random, count: int, spec: RunSpec) -> tuple[int, ...]:
    return tuple(draw.randrange(4, spec.model.vocab_size) for _ in range(count))


def true_norm(spec_json: str, masters: str, samples: Sequence[TrainSample]) -> dict[str, float]:
    """Return the float64 norm with the model's float32 angles, and with exact ones."""
    from engines.checkpoint.convert import read_dcp_model
    from tools.gpu.float64_replay import norm_of, reference_gradients

    spec = RunSpec.model_validate_json(spec_json)
    weights = {
        name: tensor.to(spec.execution.device)
        for name, tensor in read_dcp_model(masters, spec.model).items()
    }
    norms = {}
    for name, is_float32 in (("of the model's angles", True), ("of exact angles", False)):
        found = reference_gradients(spec, weights, list(samples), float32_angles=is_float32)
        norms[name] = norm_of(found)
    return norms
