"""Evaluate the policy during training, on prompts and sampling of its own.

Results go to `evals/step-000004.json` and, as `eval/<set>/...`, into the step's line of
metrics.jsonl; nothing goes into the ledger, so that a run with evaluations and one without are
compared as they are. The rollout engine must hold the weights of the step.

    prepare_evals(opened, model, evals)    # once, after the engines have started
    evaluate_due(opened, step=4)           # after each step
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from engines.cluster import gather_work
from engines.contracts import ArtifactRef
from engines.data import data_file
from engines.evaluation import EvalResult, eval_prompts, eval_requests, judge_eval
from engines.runs import write_json
from model_specs.run_spec import EvalSet
from tasks.session import LegSession

logger = logging.getLogger("lockstep")


def prepare_evals(opened: LegSession, model: ArtifactRef, evals: ArtifactRef) -> None:
    """Render the prompts of every set in an engine's process.

    Args:
        opened: Session whose engines have started.
        model: Folder with tokenizer and chat template.
        evals: Folder with a folder of data a set.
    """
    for chosen in opened.spec.plan.evals:
        data = chosen.data_of(opened.spec.data)
        as_run = opened.spec.model_copy(update={"data": data})
        (prompts,) = gather_work(
            [
                opened.rollout_hosts[0].run(
                    "engines.rollout.prompts:build_prompts",
                    model.uri,
                    str(data_file(Path(evals.uri, chosen.name), split=chosen.split)),
                    as_run.model_dump_json(),
                )
            ],
            what=f"rendering of the prompts of {chosen.name}",
            execution=opened.spec.execution,
        )
        opened.eval_prompts[chosen.name] = prompts
        logger.info(
            "%s eval %s: %d prompts, %d longer than %d tokens left out",
            opened.leg,
            chosen.name,
            len(eval_prompts(chosen, prompts)),
            prompts.num_dropped_too_long,
            data.max_prompt_tokens,
        )


def evaluate_before(opened: LegSession, step: int) -> None:
    """Evaluate what is to be evaluated before the first update, at the weights of `step`."""
    _evaluate(opened, [chosen for chosen in opened.spec.plan.evals if chosen.before_training], step)


def evaluate_due(opened: LegSession, step: int) -> None:
    """Evaluate the sets that are due after `step`."""
    _evaluate(opened, [chosen for chosen in opened.spec.plan.evals if chosen.is_due(step)], step)


def _evaluate(opened: LegSession, due: Sequence[EvalSet], step: int) -> None:
    if not due:
        return
    started = time.perf_counter()
    results = {chosen.name: _result(opened, chosen, step) for chosen in due}
    opened.fence.check()
    write_json(
        opened.folder / "evals" / f"step-{step:06d}.json",
        {
            "step": step,
            "sets": {
                name: {
                    "metrics": dict(result.metrics),
                    "digest": result.digest,
                    "samples": list(result.rows),
                }
                for name, result in results.items()
            },
        },
    )
    metrics = {name: value for result in results.values() for name, value in result.metrics.items()}
    metrics["perf/eval_s"] = time.perf_counter() - started
    with (opened.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "metrics": metrics}, sort_keys=True) + "\n")
    for name, result in results.items():
        logger.info(
            "%s eval %s step %d: accuracy %.4f of %d, reward %.3f",
            opened.leg,
            name,
            step,
            result.metrics[f"eval/{name}/accuracy"],
            result.metrics[f"eval/{name}/num"],
            result.metrics[f"eval/{name}/reward_mean"],
        )


def _result(opened: LegSession, chosen: EvalSet, step: int) -> EvalResult:
    _, rollout, _ = opened.engines()
    prompts = eval_prompts(chosen, opened.eval_prompts[chosen.name])
    requests = eval_requests(chosen, prompts, root=opened.spec.seeds.root, step=step)
    samples = rollout.generate(requests, sampling=chosen.sampling)
    return judge_eval(chosen, prompts, samples, opened.spec.eval_reward(chosen))
