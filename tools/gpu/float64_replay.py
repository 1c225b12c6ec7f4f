"""One float32 step of the 0.5B shape on the GPU against float64: gradient norm, and each tensor.

    python3 -m tools.gpu.float64_replay [OUT.json] [--recipe gsm8k_qwen2_5_0_5b] [--samples 16]

The trainer of the product runs in float32, packed into slots, with gradient checkpointing and
without; the two must have the same bits. The reference is `tests.engines.reference_model`: plain
PyTorch in float64, one sample at a time, nothing of `engines` in it. Its rotary angles are exact;
the model's own are products of float32, so the norm is also compared with a reference that has
those. TF32 is read back. Exit code 1 where a norm is not within 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engines.train.group import trainer_env
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe

BOUND = 1e-6
"""Relative error of the gradient norm; fixed beforehand."""


def main() -> int:
    """Run, print, write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--recipe", default="gsm8k_qwen2_5_0_5b")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--scratch", default=str(Path(tempfile.gettempdir()) / "float64-replay"))
    options = parser.parse_args()
    spec = apply_overrides(
        load_recipe(options.recipe),
        (
            f"execution.device={options.device}", "numerics.compute_dtype=float32",
            f"sampling.max_new_tokens={options.new_tokens}", "loss.reference=false",
            "reduction.slots=4", *options.set,
        ),
    )  # fmt: skip
    os.environ.update(trainer_env(spec))
    report = replay(spec, options.samples, Path(options.scratch))
    print(json.dumps(report, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))
    good = report["bits_with_and_without_checkpointing"] == "equal"
    return 0 if good and abs(report["norm_error"]) < BOUND else 1


def replay(spec: Any, count: int, folder: Path) -> dict[str, Any]:
    """Return the figures of one step; the reference runs last, when the trainer is gone."""
    import torch

    from tools.gpu.local_trainer import samples, started

    chosen = samples(spec, count)
    found: list[dict[str, Any]] = []
    norms, seconds = [], []
    masters: dict[str, Any] = {}
    for checkpointing in (False, True):
        wanted = apply_overrides(
            spec, (f"trainer_options.gradient_checkpointing={str(checkpointing).lower()}",)
        )
        with started(wanted, folder) as trainer:
            trainer.score(chosen)
            began = time.perf_counter()
            shards, _ = trainer._gradients(chosen)
            norms.append(trainer._norm(shards))
            seconds.append(round(time.perf_counter() - began, 2))
            found.append({name: shard.local.clone() for name, shard in shards.items()})
            masters = {name: shard.local.clone() for name, shard in trainer._shards.items()}
    equal = all(torch.equal(found[0][name], other) for name, other in found[1].items())
    exact = reference_gradients(spec, masters, chosen, float32_angles=False)
    same_angles = reference_gradients(spec, masters, chosen, float32_angles=True)
    errors = {
        name: float((found[0][name].double() - wanted).norm() / wanted.norm())
        for name, wanted in same_angles.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "recipe": spec.recipe,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "samples": count,
        "tokens": sum(len(sample.token_ids) for sample in chosen),
        "tf32": {
            "cuda.matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "kernels": "input_precision ieee",
        },
        "bits_with_and_without_checkpointing": "equal" if equal else "different",
        "norm": norms[0],
        "norm_float64": norm_of(same_angles),
        "norm_error": norms[0] / norm_of(same_angles) - 1,
        "norm_error_to_exact_angles": norms[0] / norm_of(exact) - 1,
        "worst_tensor": {worst: errors[worst]},
        "update_s": seconds,
        "peak_gib": peak,
    }


def norm_of(gradients: dict[str, Any]) -> float:
    """Return the norm over all tensors, in float64."""
    import torch

    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def reference_gradients(
    spec: Any, masters: dict[str, Any], chosen: list[Any], *, float32_angles: bool
) -> dict[str, Any]:
    """Return name -> float64 gradient of the update's loss, one sample after the other.

    On policy the ratio is 1, so a token's loss is -A * ratio.
    """
    import torch

    from tests.engines import reference_model

    weights = {name: value.double().requires_grad_() for name, value in masters.items()}
    total = sum(len(sample.token_ids) for sample in chosen)
    kept = reference_model._rotated
    if float32_angles:
        reference_model._rotated = rotated_by_float32_angles
    try:
        with torch.device(next(iter(masters.values())).device):
            for sample in chosen:
                ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
                logits = reference_model.plain_logits(weights, ids, spec.model)
                rows = logits[len(sample.prompt_token_ids) - 1 : -1] / spec.sampling.temperature
                logs = torch.log_softmax(rows, -1)
                chosen_logs = logs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
                ratio = (chosen_logs - chosen_logs.detach()).exp()
                weight = 1 / total
                if spec.loss.aggregation != "per_token":
                    weight = 1 / (len(chosen) * len(sample.token_ids))
                (-sample.advantage * weight * ratio).sum().backward()
    finally:
        reference_model._rotated = kept
    return {name: value.grad for name, value in weights.items()}


def rotated_by_float32_angles(x: Any, spec: Any) -> Any:
    """Turn by float64 sines of the angles that the model has: float32 products."""
    import torch

    half = spec.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device="cpu") * 2 / spec.head_dim
    frequencies = (1.0 / spec.rope_theta**exponent).to(x.device)
    angle = torch.arange(x.shape[0], dtype=torch.float32, device=x.device)[:, None] * frequencies
    cosine, sine = torch.cos(angle.double())[:, None], torch.sin(angle.double())[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


if __name__ == "__main__":
    sys.exit(main())
