"""Step time and memory of every trainer side by side, and of stock transformers beside them.

Each row runs in a fresh process, so that its peak memory is its own. A step is the score of all
samples and one update with its evidence (digests of loss, gradients, moments and weights). `stock`
is transformers' own forward and backward in the same dtype, one sequence at a time, with torch's
AdamW: no shared ops, no tree, no evidence.

    python tools/bench_trainers.py tiny
    python tools/bench_trainers.py 135m --steps 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROWS = ("fsdp2", "megatron", "fsdp2, stock reduction", "megatron, stock reduction", "stock")
SIZES = {"tiny": ("tiny_cpu", 32, 40, 20), "135m": ("gsm8k_smollm2_135m", 8, 64, 64)}
"""Name -> recipe, samples an update, prompt tokens, completion tokens."""


def bench_spec(size: str, row: str) -> Any:
    """Return the recipe's spec on this trainer, with the samples of this benchmark."""
    from model_specs.overrides import apply_overrides
    from model_specs.registry import load_recipe

    recipe, samples, *_ = SIZES[size]
    overrides = [
        f"trainer={'megatron' if row.startswith('megatron') else 'fsdp2'}",
        "data.prompts_per_step=2",
        f"sampling.samples_per_prompt={samples // 2}",
        "loss.reference=true",
        "reduction.slots=2",
        "model.path=generated:bench",
    ]
    if "stock reduction" in row:
        overrides += ["reduction.kind=stock", "reduction.world_size=1"]
    return apply_overrides(load_recipe(recipe), overrides)


def bench_samples(size: str, vocabulary: int) -> list[Any]:
    """Return samples of one length from a fixed rule."""
    from engines.contracts import TrainSample

    _, count, prompt, completion = SIZES[size]
    return [
        TrainSample(
            request_id=f"1/train-{i}/0",
            prompt_token_ids=tuple((31 * i + 7 * k) % vocabulary for k in range(prompt)),
            token_ids=tuple((17 * i + 5 * k) % vocabulary for k in range(completion)),
            advantage=(i % 5 - 2) / 2 or 0.25,
        )
        for i in range(count)
    ]


def run_trainer(size: str, row: str, folder: Path, steps: int) -> dict[str, Any]:
    """Start the trainer on one rank and time its steps."""
    import importlib

    from engines.train.registry import TRAINERS

    spec = bench_spec(size, row)
    module, _, name = TRAINERS[spec.trainer].partition(":")
    started = time.perf_counter()
    trainer = getattr(importlib.import_module(module), name)(
        spec.model_dump_json(),
        dcp_dir=str(folder / "dcp"),
        rank=0,
        world_size=1,
        rendezvous=f"file://{folder}/rendezvous-{os.getpid()}",
        threads=1,
    )
    start_s = time.perf_counter() - started
    samples = bench_samples(size, spec.model.vocab_size)
    score_s, update_s = [], []
    for step in range(1, steps + 1):
        begun = time.perf_counter()
        trainer.score(samples)
        scored = time.perf_counter()
        trainer.update(samples, step=step, update=0)
        score_s.append(scored - begun)
        update_s.append(time.perf_counter() - scored)
    state = trainer.state_digest()
    trainer.close()
    return {
        "start_s": start_s,
        "score_s": min(score_s),
        "update_s": min(update_s),
        "state": state,
    }


def run_stock(size: str, folder: Path, steps: int) -> dict[str, Any]:
    """Time transformers' own model over the same samples."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    spec = bench_spec(size, "fsdp2")
    started = time.perf_counter()
    dtype = getattr(torch, spec.numerics.compute_dtype)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    start_s = time.perf_counter() - started
    samples = bench_samples(size, spec.model.vocab_size)

    def logprobs(sample: Any) -> torch.Tensor:
        ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
        logits = model(ids[None]).logits[0, len(sample.prompt_token_ids) - 1 : -1]
        rows = torch.log_softmax(logits.float(), -1)
        return rows.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]

    score_s, update_s = [], []
    for _ in range(steps):
        begun = time.perf_counter()
        with torch.no_grad():  # twice: the policy and the reference
            for sample in (*samples, *samples):
                logprobs(sample)
        scored = time.perf_counter()
        optimizer.zero_grad()
        for sample in samples:
            (-sample.advantage * logprobs(sample).mean() / len(samples)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        score_s.append(scored - begun)
        update_s.append(time.perf_counter() - scored)
    return {"start_s": start_s, "score_s": min(score_s), "update_s": min(update_s), "state": ""}


def child(size: str, row: str, folder: Path, steps: int) -> None:
    """Run one row and print its figures as JSON."""
    found = (
        run_stock(size, folder, steps) if row == "stock" else run_trainer(size, row, folder, steps)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"row": row, **found, "peak_rss_mib": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--row", choices=ROWS)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.row:
        child(arguments.size, arguments.row, arguments.folder, arguments.steps)
        return
    from engines.checkpoint.convert import convert_hf_to_dcp
    from engines.checkpoint.tiny_model import write_tiny_model

    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    print("| trainer | start s | score s | update s | peak RSS MiB | state |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = Path(scratch), bench_spec(arguments.size, "fsdp2").model
        write_tiny_model(folder / "hf", model)
        convert_hf_to_dcp(folder / "hf", folder / "dcp", model)
        for row in ROWS:
            done = subprocess.run(
                [
                    *(sys.executable, __file__, arguments.size, "--row", row),
                    *("--folder", str(folder), "--steps", str(arguments.steps)),
                ],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{row}: {done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {row} | {found['start_s']:.1f} | {found['score_s']:.2f} | "
                f"{found['update_s']:.2f} | {found['peak_rss_mib']:.0f} | {found['state'][:8]} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
