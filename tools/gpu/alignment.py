"""Rollout and trainer as the product starts them, on one GPU: is every log-prob difference 0.0?

    python3 -m tools.gpu.alignment RECIPE [--model FOLDER] [--set key=value ...] [--steps 4]
        [--requests 128] [--new-tokens 128] [--out OUT.json]

Engines run in Ray processes of their own. Each step pushes the weights (sent = received, digest by
digest), draws, scores at the sampling weights, compares bit by bit, and takes an optimizer step
with advantages of +1 and -1. At step 1 the draw is repeated: again, in another order, with the
prefixes cached, and two requests alone. Without `--model` weights are random.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import Sample, SampleRequest, TrainSample
from engines.gates.logprobs import compare_logprobs
from engines.rollout.group import RolloutGroup, engine_env
from engines.train.group import TrainerGroup, trainer_env
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec


def write_random_model(folder: str, spec_json: str) -> None:
    """Write a folder of the spec's shape with random weights and the character tokenizer."""
    import torch
    from safetensors.torch import save_file

    from engines.checkpoint.tiny_model import config_json, write_tiny_model
    from model_specs.families.decoder import parameter_shapes

    model = RunSpec.model_validate_json(spec_json).model
    small = model.model_copy(update={"num_layers": 1, "vocab_size": 100, "intermediate_size": 64})
    write_tiny_model(folder, small)
    Path(folder, "config.json").write_text(json.dumps(config_json(model)))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in parameter_shapes(model).items():
        noise = torch.randn(*shape, generator=generator)
        values = 1 + 0.05 * noise if "norm" in name else 0.02 * noise
        tensors[name] = values.bfloat16()
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--scratch", default=str(Path(tempfile.gettempdir()) / "alignment"))
    parser.add_argument("--out")
    options = parser.parse_args()
    overrides = (
        "execution.device=cuda", f"execution.max_num_seqs={options.requests}",
        "execution.kv_cache_mib=16384", "execution.object_store_mib=8192",
        f"sampling.max_new_tokens={options.new_tokens}", "sampling.samples_per_prompt=2",
        f"data.prompts_per_step={options.requests // 2}", "optimizer.lr=1e-5", *options.set,
    )  # fmt: skip
    spec = apply_overrides(load_recipe(options.recipe), overrides)
    report = run(spec, options.model, steps=options.steps, scratch=Path(options.scratch))
    print(json.dumps(report, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))


def run(spec: RunSpec, model: str | None, *, steps: int, scratch: Path) -> dict[str, Any]:
    """Start both engines and run all steps; return figures as JSON values."""
    scratch.mkdir(parents=True, exist_ok=True)
    spec_json = spec.model_dump_json()
    store = spec.execution.object_store_mib
    with Cluster("gpu-alignment", num_cpus=2, object_store_mib=store) as cluster:
        engine = cluster.start("rollout-0", env=engine_env(spec), num_cpus=1)
        rank = cluster.start("trainer-0", env=trainer_env(spec), num_cpus=1)
        if model is None:
            model = str(scratch / "model")
            if not Path(model).is_dir():
                write = "tools.gpu.alignment:write_random_model"
                gather([rank.run(write, model, spec_json)], what="random weights")
        started = time.perf_counter()
        created = engine.actor.create.remote(
            "engines.rollout.vllm_engine:VllmEngine", model, spec_json
        )
        masters = scratch / f"dcp-{time.time_ns()}"
        convert = "engines.checkpoint.convert:convert_hf_to_dcp"
        gather([rank.run(convert, model, str(masters), spec.model)], what="conversion")
        trainer = TrainerGroup([rank], spec)
        trainer.start(spec, dcp_dir=masters, rendezvous=f"file://{masters}-rendezvous")
        gather([created], what="start of the engine", timeout_s=500)
        rollout = RolloutGroup([engine], spec)
        figures: dict[str, Any] = {
            "recipe": spec.recipe,
            "model": model,
            "start_s": round(time.perf_counter() - started, 1),
            "rollout": rollout.environment(),
            "ops_outside": {"trainer": trainer.audit()},
            "steps": [],
        }
        for step in range(1, steps + 1):
            print(f"step {step}", flush=True)
            figures["steps"].append(one_step(spec, engine, rollout, trainer, step))
            print(json.dumps(figures["steps"][-1]), flush=True)
        return figures


def one_step(
    spec: RunSpec, engine: EngineHandle, rollout: RolloutGroup, trainer: TrainerGroup, step: int
) -> dict[str, Any]:
    """Push, draw, score, compare and update; return the figures of the step."""
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return round(clock[-1] - clock[-2], 3)

    buckets, sent = trainer.send(version=step)
    received = rollout.receive(buckets, version=step)
    figures: dict[str, Any] = {"sent_is_received": sent == received, "push_s": lap()}
    chosen = requests(spec, step)
    samples = rollout.generate(chosen)
    tokens = sum(len(sample.token_ids) for sample in samples)
    figures |= {"tokens": tokens, "draw_s": lap()}
    if step == 1:
        figures["same_answer"] = repeated(engine, chosen, samples)
        lap()
    train = [
        TrainSample(
            request_id=sample.request_id,
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=sample.token_ids,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, sample in enumerate(samples)
    ]
    trainer.score(train)
    figures["score_s"] = lap()
    gate = compare_logprobs(step, samples, trainer.scores())
    figures |= {
        "exact": gate.num_exact, "compared": gate.num_tokens, "max_abs_diff": gate.max_abs_diff,
        "faults": list(gate.faults),
    }  # fmt: skip
    lap()
    record = trainer.update(train, step=step, update=0)
    figures |= {
        "update_s": lap(),
        "grad_norm": record.metrics["train/grad_norm"],
        "loss": record.metrics["train/loss"],
        "changed_weights": record.changed_weights,
    }
    return figures


def repeated(
    engine: EngineHandle, chosen: list[SampleRequest], samples: tuple[Sample, ...]
) -> dict[str, str]:
    """Draw the same requests again in other company; return how many answers are the same."""
    first = {sample.request_id: sample for sample in samples}
    shuffled = random.Random(1).sample(chosen, len(chosen))
    found = {}
    for name, group, is_cold in (
        ("again", chosen, True), ("warm prefixes", chosen, False), ("shuffled", shuffled, True),
        ("alone", chosen[:1], True), ("two alone", chosen[5:7], True),
    ):  # fmt: skip
        if is_cold:
            gather([engine.call("reset_prefix_cache")], what="reset")
        (answers,) = gather([engine.call("generate", group)], what=name)
        same = sum(answer == first[answer.request_id] for answer in answers)
        found[name] = f"{same} of {len(group)}"
    return found


def requests(spec: RunSpec, step: int) -> list[SampleRequest]:
    """Return requests over random prompts of 16 to 300 tokens, two a prompt."""
    source = random.Random(step)
    limit = min(300, spec.data.max_prompt_tokens)
    chosen = []
    for prompt in range(spec.data.prompts_per_step):
        length = source.randrange(16, limit)
        tokens = tuple(source.randrange(4, spec.model.vocab_size) for _ in range(length))
        chosen += [
            SampleRequest(
                request_id=f"{step}/{prompt}/{index}",
                prompt_id=str(prompt),
                sample_index=index,
                prompt_token_ids=tokens,
                seed=step * 100000 + prompt * 10 + index,
            )
            for index in range(spec.sampling.samples_per_prompt)
        ]
    return chosen


if __name__ == "__main__":
    main()
