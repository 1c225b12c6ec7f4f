"""Tokens a second of vLLM on the shared ops against vLLM on its own, side by side in one run.

    python -m tools.bench_rollout RECIPE [--set key=value ...] [--rounds 3] [--batch 16]

Both engines run in processes of their own on the same folder of weights and draw the same requests
in turn, so that the machine's load falls on both. Prints the median of each and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engines.checkpoint.download import download_model
from engines.checkpoint.hf import read_hf_state
from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import SampleRequest
from engines.rollout.group import engine_env
from engines.seeds import derive_seed
from engines.weights.wire import pack
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

PROMPT_TOKENS = 64
NAMES = ("aligned", "native")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    spec = apply_overrides(load_recipe(options.recipe), tuple(options.set))
    with tempfile.TemporaryDirectory() as folder:
        model = download_model(spec.model, Path(folder) / "model").folder
        rates = measure(spec, model, rounds=options.rounds, batch=options.batch)
    for name in NAMES:
        print(f"{name:8} {statistics.median(rates[name]):9.1f} tokens/s (absolute)")
    pairs = zip(rates["native"], rates["aligned"], strict=True)
    ratios = [native / aligned for native, aligned in pairs]
    print(f"native / aligned: median {statistics.median(ratios):.2f}, all {sorted(ratios)}")


def measure(spec: RunSpec, model: str, *, rounds: int, batch: int) -> dict[str, list[float]]:
    """Return name -> tokens a second of each round; the first round of each is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    with Cluster("bench-rollout", num_cpus=2, object_store_mib=512) as cluster:
        engines = {name: start(cluster, name, spec, model) for name in NAMES}
        for number in range(rounds + 1):
            for name, engine in engines.items():
                rate = draw(engine, requests(spec, number, batch))
                if number:
                    rates[name].append(rate)
    return rates


def start(cluster: Cluster, name: Any, spec: RunSpec, model: str) -> EngineHandle:
    """Start one engine on the folder's own weights."""
    handle = cluster.start(name, env=engine_env(spec, policy=name))
    created = handle.actor.create.remote(
        "engines.rollout.vllm_engine:VllmEngine",
        model,
        spec.model_dump_json(),
        policy=name,
        load_format="auto",
    )
    gather([created], what=f"start of the {name} engine")
    if name == "aligned":
        state = read_hf_state(model, spec.model)
        dtype = getattr(torch, spec.numerics.compute_dtype)
        cast = {tensor_name: tensor.to(dtype) for tensor_name, tensor in state.items()}
        buckets = list(pack(cast.items(), bucket_mib=spec.execution.bucket_mib))
        gather([handle.call("receive", buckets, version=0)], what="push")
    return handle


def draw(engine: EngineHandle, chosen: list[SampleRequest]) -> float:
    """Draw and return tokens a second."""
    started = time.perf_counter()
    (samples,) = gather([engine.call("generate", chosen)], what="drawing")
    return sum(len(sample.token_ids) for sample in samples) / (time.perf_counter() - started)


def requests(spec: RunSpec, number: int, batch: int) -> list[SampleRequest]:
    """Return requests over pseudo-random prompts, other ones in every round."""
    return [
        SampleRequest(
            request_id=f"{number}/{index}",
            prompt_id=str(index),
            sample_index=0,
            prompt_token_ids=tuple(
                derive_seed(0, number, index, place) % spec.model.vocab_size
                for place in range(PROMPT_TOKENS)
            ),
            seed=derive_seed(1, number, index),
        )
        for index in range(batch)
    ]


if __name__ == "__main__":
    main()
