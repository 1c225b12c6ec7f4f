"""What a step costs, exact beside stock, in one run on one GPU: medians, memory, evidence.

    python3 -m tools.gpu.bench_step gsm8k_qwen2_5_0_5b [--variants fsdp2 megatron stock plain]
        [--requests 128] [--new-tokens 128] [--slots 8] [--rounds 3] [--set key=value ...]
        [--out OUT.json]

`fsdp2` and `megatron`: the product on the shared ops. `stock`: numerics.policy=stock. `plain`: a
stock trainer's step on the samples that were drawn last (`tools.gpu.plain_step`). A whole step is
push, draw, score and update; its first round is not counted. Both stock variants stay repeatable
where that is torch's own switch, and their rollout is vLLM's own ops without its compiler: the
ratio to `plain` is the one to a trainer as people run it, that to the rollout as installed is
`tools.gpu.bench_vllm`'s. RECIPE may also be `qwen3_4b`
(`tools.gpu.shapes`). Weights are random. A variant that fails is reported and the others go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from engines.cluster import Cluster, gather
from engines.contracts import TrainSample
from engines.gates.logprobs import compare_logprobs
from engines.train.group import trainer_env
from model_specs.overrides import apply_overrides
from model_specs.run_spec import RunSpec
from tools.gpu.alignment import requests
from tools.gpu.shapes import recipe_of_shape
from tools.gpu.start import Started, as_train, started

PHASES = ("push_s", "draw_s", "score_s", "update_s")
UNALIGNED = (
    "numerics.policy=stock", "plan.gates.logprobs=report", "plan.gates.preflight=off",
    "plan.gates.controls=off", "plan.gates.layerwise=off",
)  # fmt: skip
VARIANTS = {"fsdp2": (), "megatron": ("trainer=megatron",), "stock": UNALIGNED}


def main() -> None:
    """Measure every variant, print a line each, write all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS, "plain"])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-mib", type=int, default=16384)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--transport", default="host", help="of the weights: host or cuda_ipc")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    overrides = (
        "execution.device=cuda", f"execution.max_num_seqs={options.requests}",
        f"execution.kv_cache_mib={options.kv_cache_mib}", "execution.object_store_mib=4096",
        f"sampling.max_new_tokens={options.new_tokens}", "sampling.samples_per_prompt=2",
        f"data.prompts_per_step={options.requests // 2}", f"reduction.slots={options.slots}",
        "loss.reference=false", f"execution.transport={options.transport}",
        *options.set,
    )  # fmt: skip
    report: dict[str, Any] = {"recipe": options.recipe, "options": vars(options) | {"out": ""}}
    drawn: list[TrainSample] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.variants:
            begun = time.perf_counter()
            spec = apply_overrides(
                recipe_of_shape(options.recipe), (*overrides, *VARIANTS.get(name, ()))
            )
            try:
                if name == "plain":
                    found = plain(spec, drawn, options.rounds)
                else:
                    with started(spec, Path(folder)) as engines:
                        found, drawn = whole_steps(engines, options.rounds)
            except Exception as error:  # the other variants are still worth their figures
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
            found["seconds_in_all"] = round(time.perf_counter() - begun, 1)
            report[name] = found
            print(name, json.dumps(found), flush=True)
            if options.out:
                options.out.write_text(json.dumps(report | {"ratios": ratios(report)}, indent=1))
    print("ratios", json.dumps(ratios(report)))


def whole_steps(engines: Started, rounds: int) -> tuple[dict[str, Any], list[TrainSample]]:
    """Return medians of the phases, evidence and memory; and the samples drawn last."""
    take = "engines.provenance.evidence_time:take_seconds"
    rows: list[dict[str, float]] = []
    exact = compared = 0
    train: list[TrainSample] = []
    for step in range(1, rounds + 2):
        chosen = requests(engines.spec, step)
        handles = (engines.engine, engines.rank)
        gather([handle.run(take) for handle in handles], what="evidence")
        clock = [time.perf_counter()]
        assert engines.push(step), "what arrived is not what was sent"
        clock.append(time.perf_counter())
        samples = engines.rollout.generate(chosen)
        clock.append(time.perf_counter())
        train = as_train(samples)
        engines.trainer.score(train)
        clock.append(time.perf_counter())
        engines.trainer.update(train, step=step, update=0)
        clock.append(time.perf_counter())
        spent = gather([handle.run(take) for handle in handles], what="evidence")
        gate = compare_logprobs(step, samples, engines.trainer.scores())
        exact, compared = exact + gate.num_exact, compared + gate.num_tokens
        phases = [after - before for before, after in itertools.pairwise(clock)]
        rows.append(
            dict(zip(PHASES, phases, strict=True))
            | {"evidence_s": sum(spent), "tokens": gate.num_tokens}
        )
    counted = rows[1:]
    medians = {name: statistics.median(row[name] for row in counted) for name in counted[0]}
    peaks = gather(
        [handle.run("tools.gpu.start:memory") for handle in (engines.engine, engines.rank)],
        what="memory",
    )
    step_s = sum(medians[name] for name in PHASES)
    return {
        "start_s": engines.start_s,
        **{name: round(value, 4) for name, value in medians.items()},
        "step_s": round(step_s, 4),
        "draw_tok_per_s": round(medians["tokens"] / medians["draw_s"]),
        "evidence_share": round(medians["evidence_s"] / step_s, 4),
        "exact": exact,
        "compared": compared,
        "rollout_memory": peaks[0],
        "trainer_memory": peaks[1],
    }, train


def plain(spec: RunSpec, samples: list[TrainSample], rounds: int) -> dict[str, Any]:
    """Run the stock trainer's step in a process of its own, without what makes it repeatable."""
    if not samples:
        return {"failed": "no variant before this one has drawn samples"}
    env = {
        name: value
        for name, value in trainer_env(spec).items()
        if not name.startswith(("CUBLAS", "NCCL", "NVTE"))
    }
    with Cluster("gpu-plain", num_cpus=1, object_store_mib=1024) as cluster:
        handle = cluster.start("plain", env=env, num_cpus=1)
        run = "tools.gpu.plain_step:run"
        (found,) = gather(
            [handle.run(run, spec.model_dump_json(), samples, rounds)], what="plain step"
        )
    result: dict[str, Any] = found
    return result


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Return exact over stock, for the trainer's part and for the whole step."""

    def trainer_s(name: str) -> float | None:
        row = report.get(name, {})
        return row["score_s"] + row["update_s"] if "update_s" in row else None

    found = {}
    for exact in ("fsdp2", "megatron"):
        for other in ("stock", "plain"):
            ours, theirs = trainer_s(exact), trainer_s(other)
            if ours and theirs:
                found[f"trainer step, {exact} / {other}"] = round(ours / theirs, 3)
        if "step_s" in report.get(exact, {}) and "step_s" in report.get("stock", {}):
            found[f"whole step, {exact} / stock"] = round(
                report[exact]["step_s"] / report["stock"]["step_s"], 3
            )
    return found


if __name__ == "__main__":
    main()
