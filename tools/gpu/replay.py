"""One step of a real shape, replayed: repeats, packing, gradient checkpointing, and float64.

    python3 -m tools.gpu.replay gsm8k_qwen2_5_0_5b [--repeats 50] [--samples 8] [--out OUT.json]

In this process, random weights and tokens. In bfloat16 the gradients of one step are taken
`--repeats` times: one outcome. In float32 (no TF32, read back) the whole update is taken with and
without gradient checkpointing: equal digests; every sample is scored packed and alone: equal bits;
and the norm of the gradient is held against that of the tests' textbook model in float64 on the
same weights: within 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from engines.contracts import TrainSample
from engines.train.group import trainer_env
from model_specs.overrides import apply_overrides
from model_specs.run_spec import RunSpec
from tools.gpu.shapes import recipe_of_shape, write_random_model

BOUND = 1e-6


def main() -> None:
    """Run all parts, print and write; exit code 1 where one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = apply_overrides(
        recipe_of_shape(options.recipe),
        (
            "execution.device=cuda", "sampling.samples_per_prompt=2", "reduction.slots=2",
            f"data.prompts_per_step={options.samples // 2}", "loss.reference=false",
            "optimizer.clip_grad=1000.0",
        ),
    )  # fmt: skip
    # Read when torch loads, so before that.
    os.environ.update(trainer_env(spec))
    samples = made_samples(spec, options.samples)
    with tempfile.TemporaryDirectory() as folder:
        report = run(spec, samples, Path(folder), options.repeats)
    print(json.dumps(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    raise SystemExit(0 if report["holds"] else 1)


def made_samples(spec: RunSpec, count: int) -> list[TrainSample]:
    """Return samples of 20 to 250 prompt and 64 completion tokens."""
    source = random.Random(3)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(source.randrange(spec.model.vocab_size) for _ in range(number))

    return [
        TrainSample(
            request_id=f"1/{index}",
            prompt_token_ids=tokens(source.randrange(20, 250)),
            token_ids=tokens(64),
            advantage=1.0 if index % 2 else -0.5,
        )
        for index in range(count)
    ]


def run(spec: RunSpec, samples: list[TrainSample], folder: Path, repeats: int) -> dict[str, Any]:
    """Run the parts; return figures as JSON values."""
    from engines.checkpoint.convert import convert_hf_to_dcp

    write_random_model(str(folder / "hf"), spec.model_dump_json())
    convert_hf_to_dcp(folder / "hf", folder / "dcp", spec.model)
    report = repeated(spec, samples, folder, repeats)
    in_float32 = apply_overrides(spec, ("numerics.compute_dtype=float32",))
    kept, gradient_norm = updated(in_float32, samples, folder, report)
    checkpointed, _ = updated(
        apply_overrides(in_float32, ("trainer_options.gradient_checkpointing=true",)),
        samples, folder, {},
    )  # fmt: skip
    exact = float64_norm(spec, samples, folder)
    report |= {
        "checkpointing_is_equal": kept == checkpointed,
        "norm_float32": gradient_norm,
        "norm_float64": exact,
        "relative_difference": abs(gradient_norm - exact) / exact,
    }
    report["holds"] = (
        report["outcomes"] == 1
        and report["checkpointing_is_equal"]
        and report["alone_is_packed"] == len(samples)
        and report["float32_matmul_precision"] == "highest"
        and report["relative_difference"] <= BOUND
    )
    return report


def trainer(spec: RunSpec, folder: Path) -> Any:
    """Start the trainer in this process."""
    from engines.train.fsdp2.actor import Fsdp2Trainer

    return Fsdp2Trainer(
        spec.model_dump_json(), dcp_dir=str(folder / "dcp"), rank=0, world_size=1,
        rendezvous=f"file://{folder}/rendezvous-{time.time_ns()}",
    )  # fmt: skip


def repeated(
    spec: RunSpec, samples: list[TrainSample], folder: Path, repeats: int
) -> dict[str, Any]:
    """Take the gradients of one step again and again, while other work loads the GPU."""
    import torch

    from engines.train.shards import merged_digests

    running = trainer(spec, folder)
    running.score(samples)
    side = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    outcomes = set()
    for _ in range(repeats):
        with torch.cuda.stream(side):
            for _ in range(20):
                noise.sin_()
        gradients, _ = running._gradients(samples)
        outcomes.add(json.dumps(merged_digests(gradients), sort_keys=True))
    running.close()
    return {"repeats": repeats, "outcomes": len(outcomes)}


def updated(
    spec: RunSpec, samples: list[TrainSample], folder: Path, report: dict[str, Any]
) -> tuple[Any, float]:
    """Take one update; return the digests of all probes and the gradient's norm."""
    import torch

    running = trainer(spec, folder)
    alone = {}
    for sample in samples:
        running.score([sample])
        alone |= running.scores()
    running.score(samples)
    packed = running.scores()
    report["alone_is_packed"] = sum(alone[name] == row for name, row in packed.items())
    report["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    record = running.update(samples, step=1, update=0)
    running.close()
    return record.digests, float(record.metrics["train/grad_norm"])


def float64_norm(spec: RunSpec, samples: list[TrainSample], folder: Path) -> float:
    """Return the gradient's norm of the same loss in a textbook model in float64."""
    import torch
    from safetensors.torch import load_file

    from tests.engines.reference_model import plain_logits

    torch.use_deterministic_algorithms(False)
    weights = {
        name: tensor.to("cuda", torch.float64).requires_grad_()
        for name, tensor in load_file(folder / "hf" / "model.safetensors").items()
    }
    total = sum(len(sample.token_ids) for sample in samples)
    with torch.device("cuda"):
        for sample in samples:
            ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
            first = len(sample.prompt_token_ids)
            logits = plain_logits(weights, ids, spec.model)[first - 1 : -1]
            logs = torch.log_softmax(logits / spec.sampling.temperature, -1)
            chosen = logs.gather(1, ids[first:, None])[:, 0]
            (-sample.advantage * (chosen - chosen.detach()).exp().sum() / total).backward()
    squares = [tensor.grad.square().sum() for tensor in weights.values() if tensor.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


if __name__ == "__main__":
    main()
