"""Tokens a second of vLLM on one GPU: as installed (`baseline`) or on the shared ops (`aligned`).

    python3 -m tools.gpu.bench_vllm baseline --requests 128 --new-tokens 128 [--out OUT.json]

Random weights of a recipe's shape (vLLM's `dummy`), random prompts of 16 to 300 tokens, a seed and
a log-prob a request, T = 1. `baseline` is compiled, with FLASH_ATTN and without FlashInfer's
sampler; only weights, lengths and cache size are set. Each workload is drawn once to warm up, then
`--rounds` times with an empty prefix cache; the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engines.rollout.group import engine_env
from model_specs.registry import load_recipe

WORKLOADS = ((128, 128), (256, 1024))


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", choices=("baseline", "aligned"))
    parser.add_argument("--recipe", default="gsm8k_qwen2_5_0_5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", type=int, default=len(WORKLOADS))
    parser.add_argument(
        "--in-process", action="store_true", help="no process of its own for the baseline's engine"
    )
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine, report = start(options.policy, options.recipe)
    for requests, new in WORKLOADS[: options.workloads]:
        report["rates"][f"{requests} x {new}"] = rates(engine, requests, new, options.rounds)
        print(json.dumps(report), flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(report, indent=1))


def start(policy: str, recipe: str) -> tuple[Any, dict[str, Any]]:
    """Start the engine; return it, and the report without any rate yet, as JSON values."""
    spec = load_recipe(recipe)
    execution = spec.execution.model_copy(
        update={"device": "cuda", "max_num_seqs": 256, "kv_cache_mib": 20480}
    )
    spec = spec.model_copy(update={"execution": execution})
    if policy == "aligned":
        os.environ.update(engine_env(spec, policy="aligned"))
    else:
        os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch
    import vllm

    from engines.checkpoint.tiny_model import config_json
    from engines.rollout import plugin
    from engines.rollout.vllm_options import start_options

    plugin.register()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_json(spec.model)))
        own = start_options(spec, policy="aligned", max_model_len=2048)
        started = time.perf_counter()
        engine = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=256,
            kv_cache_memory_bytes=20480 << 20,
            enable_prefix_caching=True,
            seed=0,
            logprobs_mode="processed_logprobs",
            **(own if policy == "aligned" else {"attention_config": {"backend": "FLASH_ATTN"}}),
        )
        start_s = time.perf_counter() - started
    return engine, {
        "policy": policy,
        "in_process": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0",
        "recipe": recipe,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "shared_ops": list(plugin.installed()),
        "start_s": round(start_s, 1),
        "rates": {},
    }


def rates(engine: Any, requests: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the median and all tokens a second of one workload."""
    from vllm import SamplingParams

    source = random.Random(0)
    prompts = [
        {"prompt_token_ids": [source.randrange(1000, 40000) for _ in range(length)]}
        for length in (source.randrange(16, 300) for _ in range(requests))
    ]
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            seed=index,
            logprobs=0,
            detokenize=False,
        )
        for index in range(requests)
    ]
    found = []
    for number in range(rounds + 1):
        engine.reset_prefix_cache()
        started = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - started
        if number:
            found.append(sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed)
    return {"median": round(statistics.median(found)), "all": [round(rate) for rate in found]}


if __name__ == "__main__":
    main()
