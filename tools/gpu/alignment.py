"""Rollout and trainer as the product starts them, on one GPU: is every log-prob difference 0.0?

    python3 -m tools.gpu.alignment RECIPE [--model FOLDER] [--set key=value ...] [--steps 4]
        [--requests 128] [--new-tokens 128] [--out OUT.json]

Engines run in Ray processes of their own. Each step pushes the weights (sent = received, digest by
digest), draws, scores at the sampling weights, compares bit by bit, and takes an optimizer step
with advantages of +1 and -1. At step 1 the draw is repeated: again, in another order, with the
prefixes cached, and two requests alone; and eight samples are scored by themselves. After the last
step every element of every layer is compared over eight requests. Without `--model` weights are
random.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from engines.cluster import EngineHandle, gather
from engines.contracts import Sample, SampleRequest, TrainSample
from engines.gates.layerwise import compare_layers
from engines.gates.logprobs import compare_logprobs
from engines.train.group import TrainerGroup
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tools.gpu.start import Started, as_train, started

FEW = 8
"""Requests of the checks that cost more than a draw."""


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
    with started(spec, scratch, model=model) as engines:
        figures: dict[str, Any] = {
            "recipe": spec.recipe,
            "model": engines.model,
            "start_s": engines.start_s,
            "rollout": engines.rollout.environment(),
            "ops_outside": {"trainer": engines.trainer.audit()},
            "steps": [],
        }
        for step in range(1, steps + 1):
            print(f"step {step}", flush=True)
            figures["steps"].append(one_step(engines, step))
            print(json.dumps(figures["steps"][-1]), flush=True)
        figures["layers"] = layers(engines, step=steps + 1, folder=scratch)
        print(json.dumps(figures["layers"]), flush=True)
        return figures


def layers(engines: Started, *, step: int, folder: Path) -> dict[str, Any]:
    """Push, and compare every element of every layer over a few requests; return the figures."""
    engines.push(step)
    states = folder / f"layers-{time.time_ns()}"
    chosen = requests(engines.spec, step)[:FEW]
    (samples,) = gather(
        [engines.rollout.call_first("layer_states", chosen, folder=str(states))],
        what="hidden states",
    )
    engines.trainer.layer_states(as_train(samples), folder=states)
    lengths = {request.request_id: len(request.prompt_token_ids) for request in chosen}
    return compare_layers(states, lengths, num_layers=engines.spec.model.num_layers).to_dict()


def one_step(engines: Started, step: int) -> dict[str, Any]:
    """Push, draw, score, compare and update; return the figures of the step."""
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return round(clock[-1] - clock[-2], 3)

    trainer = engines.trainer
    figures: dict[str, Any] = {"sent_is_received": engines.push(step), "push_s": lap()}
    chosen = requests(engines.spec, step)
    samples = engines.rollout.generate(chosen)
    tokens = sum(len(sample.token_ids) for sample in samples)
    figures |= {"tokens": tokens, "draw_s": lap()}
    if step == 1:
        figures["same_answer"] = repeated(engines.engine, chosen, samples)
        lap()
    train = as_train(samples)
    if step == 1:
        figures["scored_alone"] = scored_alone(trainer, train)
        lap()
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


def scored_alone(trainer: TrainerGroup, train: list[TrainSample]) -> str:
    """Score all packed and a few by themselves; return how many have the same bits."""
    trainer.score(train)
    packed = dict(trainer.scores())
    same = 0
    for sample in train[:FEW]:
        trainer.score([sample])
        same += trainer.scores()[sample.request_id] == packed[sample.request_id]
    return f"{same} of {len(train[:FEW])}"


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
