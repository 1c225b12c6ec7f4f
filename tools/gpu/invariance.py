"""What a request's answer must not depend on, at a real shape, with CUDA graphs on.

    python3 -m tools.gpu.invariance gsm8k_qwen2_5_0_5b [--repeats 5] [--out OUT.json]

64 requests at once, `--repeats` times, each time in another order; prompts around the page size
with a first token or a whole prefix in common, alone and together and from the cache; and weights
W1 -> W2 -> W1, where W2 is also given to a fresh engine. Answers are compared token by token and
log-prob bit by bit. The trainer scores all of them at the end. The control is the change of the
weights: W2 must answer otherwise than W1. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.cluster import gather
from engines.contracts import Sample, SampleRequest
from engines.gates.logprobs import compare_logprobs
from model_specs.overrides import apply_overrides
from tools.gpu.alignment import requests
from tools.gpu.shapes import recipe_of_shape
from tools.gpu.start import Started, as_train, started

LENGTHS = (15, 16, 17, 33)
"""Prompt tokens around a page of 16."""


def main() -> None:
    """Run all checks, print and write; exit code 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = apply_overrides(
        recipe_of_shape(options.recipe),
        (
            "execution.device=cuda", "execution.max_num_seqs=64", "execution.kv_cache_mib=8192",
            "execution.object_store_mib=8192", f"sampling.max_new_tokens={options.new_tokens}",
            "sampling.samples_per_prompt=2", "data.prompts_per_step=32", "reduction.slots=4",
            "loss.reference=false", "optimizer.lr=1e-4",
        ),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, started(spec, Path(folder)) as engines:
        report = check(engines, options.repeats)
    print(json.dumps(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    raise SystemExit(0 if report["holds"] else 1)


def check(engines: Started, repeats: int) -> dict[str, Any]:
    """Run the checks; return figures as JSON values."""
    assert engines.push(1), "what arrived is not what was sent"
    chosen = requests(engines.spec, 1)
    first = engines.rollout.generate(chosen)
    report: dict[str, Any] = {
        "requests": len(chosen),
        "orders": [same(first, in_order(engines, chosen, seed)) for seed in range(repeats)],
        **prefixes(engines),
        **weights(engines, chosen, first),
    }
    counts = [*report["orders"], report["w1_again"], report["w2_on_a_fresh_engine"]]
    report["holds"] = (
        all(count == len(chosen) for count in counts)
        and report["prefix_same"] == report["prefix_compared"]
        and report["prefix_cached_tokens"] > 0
        and report["exact"] == report["compared"]
        and report["w2_is_w1"] < len(chosen)
    )
    return report


def same(first: Sequence[Sample], second: Sequence[Sample]) -> int:
    """Return how many answers are the same, token by token and bit by bit."""
    by_id = {sample.request_id: sample for sample in second}
    return sum(sample == by_id.get(sample.request_id) for sample in first)


def in_order(engines: Started, chosen: Sequence[SampleRequest], seed: int) -> tuple[Sample, ...]:
    """Draw in another order, from a cold cache for an even seed, a warm one for an odd."""
    if seed % 2 == 0:
        gather([engines.engine.call("reset_prefix_cache")], what="reset")
    return engines.rollout.generate(random.Random(seed).sample(list(chosen), len(chosen)))


def prefixes(engines: Started) -> dict[str, Any]:
    """Draw prompts with nothing, one token, and all but the last token in common."""
    source = random.Random(5)
    vocabulary = engines.spec.model.vocab_size
    whole = [source.randrange(4, vocabulary) for _ in range(max(LENGTHS))]
    kinds = {
        "own": lambda length: [source.randrange(4, vocabulary) for _ in range(length)],
        "one token": lambda length: [
            whole[0], *(source.randrange(4, vocabulary) for _ in range(length - 1)),
        ],
        "all but the last": lambda length: [*whole[: length - 1], source.randrange(4, vocabulary)],
        "all": lambda length: whole[:length],
    }  # fmt: skip
    chosen = [
        SampleRequest(
            request_id=f"prefix/{kind}/{length}",
            prompt_id=f"{kind}/{length}",
            sample_index=0,
            prompt_token_ids=tuple(made(length)),
            seed=length,
        )
        for kind, made in kinds.items()
        for length in LENGTHS
    ]
    alone = []
    for request in chosen:
        gather([engines.engine.call("reset_prefix_cache")], what="reset")
        alone += engines.rollout.generate([request])
    gather([engines.engine.call("reset_prefix_cache")], what="reset")
    together = engines.rollout.generate(chosen)
    again = engines.rollout.generate(chosen[::-1])
    (hits,) = gather([engines.engine.call("last_cached_tokens")], what="cache hits")
    one_by_one = [answer for request in chosen for answer in engines.rollout.generate([request])]
    return {
        "prefix_compared": 3 * len(chosen),
        "prefix_same": same(alone, together) + same(alone, again) + same(alone, one_by_one),
        "prefix_cached_tokens": sum(hits.values()),
    }


def weights(
    engines: Started, chosen: Sequence[SampleRequest], first: tuple[Sample, ...]
) -> dict[str, Any]:
    """Go to other weights and back; a fresh engine is given the others."""
    train = as_train(first)
    engines.trainer.score(train)
    gates = [compare_logprobs(1, first, engines.trainer.scores())]
    engines.trainer.update(train, step=1, update=0)
    fresh = engines.another_engine("rollout-fresh")
    assert engines.push(2, fresh), "what arrived is not what was sent"
    second, of_fresh = engines.rollout.generate(chosen), fresh.generate(chosen)
    engines.trainer.score(as_train(second))
    gates.append(compare_logprobs(2, second, engines.trainer.scores()))
    engines.trainer.load(engines.masters)
    assert engines.push(3), "what arrived is not what was sent"
    third = engines.rollout.generate(chosen)
    return {
        "w2_is_w1": same(first, second),
        "w2_on_a_fresh_engine": same(second, of_fresh),
        "w1_again": same(first, third),
        "exact": sum(gate.num_exact for gate in gates),
        "compared": sum(gate.num_tokens for gate in gates),
    }


if __name__ == "__main__":
    main()
