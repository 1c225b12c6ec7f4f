"""Choose the prompts of a recipe by a rule that is written here, before anything is drawn.

A small model earns the same reward on all samples of most problems, and a group without variance
teaches nothing. This tool draws at the recipe's initial weights with the recipe's own template,
sampling, reward and aligned rollout engine, applies `RULE`, and writes a record from which the
choice can be checked and drawn again. Invariant: the seeds carry the label `screen`, so no draw of
the screening is a draw of training; prompts are judged in file order and by nothing but their
rewards.

    python tools/screen_prompts.py gsm8k_smollm2_135m --output RECORD.json \\
        --set model.path=MODEL_DIR --set data.source=GSM8K_DIR
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import guard
from engines.contracts import Prompt, Sample, SampleRequest
from engines.loop import push
from engines.provenance.digest import digest_tokens, root_digest
from engines.rewards import score_samples
from engines.runs import new_run, write_json
from engines.seeds import derive_seed
from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tasks import convert, download, train
from tasks.session import leg_session

NUM_ROWS = 32
"""Rows of the split that are screened, from the first on."""
NUM_SAMPLES = 8
"""Samples drawn of each prompt."""
LEAST_MINORITY = 3
"""Least number of samples whose reward is not the prompt's most frequent one."""
SEED_LABEL = "screen"
PROMPTS_PER_CALL = 8

RULE = (
    f"From the first {NUM_ROWS} rows of the split, in file order, drop prompts longer than "
    f"data.max_prompt_tokens and draw {NUM_SAMPLES} samples of each of the others at the initial "
    "weights, with the recipe's template, sampling and reward. A prompt qualifies when at least "
    f"{LEAST_MINORITY} of its {NUM_SAMPLES} samples earn another reward than its most frequent "
    f"one, so that no reward is earned by more than {NUM_SAMPLES - LEAST_MINORITY} of "
    f"{NUM_SAMPLES}. Take the first plan.num_steps x data.prompts_per_step prompts that qualify, "
    "in file order. With fewer, take none: change the template or the reward, and screen again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """One prompt and what its samples earned."""

    prompt: Prompt
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int
    tokens_digest: str
    """Root over the tokens of all samples."""

    @property
    def qualifies(self) -> bool:
        """Whether the rewards vary as much as `RULE` asks for."""
        return qualifies(self.rewards)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "prompt_id": self.prompt.prompt_id,
            "prompt_digest": digest_tokens(self.prompt.prompt_id, self.prompt.token_ids),
            "prompt_tokens": len(self.prompt.token_ids),
            "label": self.prompt.label,
            "rewards": list(self.rewards),
            "qualifies": self.qualifies,
            "lengths": list(self.lengths),
            "truncated": self.truncated,
            "tokens_digest": self.tokens_digest,
        }


def qualifies(rewards: Sequence[float]) -> bool:
    """Return whether at least `LEAST_MINORITY` rewards are not the most frequent one."""
    most = max(collections.Counter(rewards).values())
    return len(rewards) - most >= LEAST_MINORITY


def choose(screened: Sequence[Screened], *, count: int) -> tuple[str, ...]:
    """Return the ids of the first `count` prompts that qualify; none when there are fewer."""
    found = [row.prompt.prompt_id for row in screened if row.qualifies]
    return tuple(found[:count]) if len(found) >= count else ()


def screening_spec(recipe: str, overrides: Sequence[str]) -> RunSpec:
    """Return the recipe's spec over the first rows of its split, in file order."""
    spec = apply_overrides(load_recipe(recipe), overrides)
    ids = tuple(f"{spec.data.split}-{row}" for row in range(NUM_ROWS))
    return spec.model_copy(
        update={"data": spec.data.model_copy(update={"prompt_ids": ids, "shuffle": False})}
    )


def requests_of(prompt: Prompt, spec: RunSpec) -> tuple[SampleRequest, ...]:
    """Return the screening requests of one prompt."""
    return tuple(
        SampleRequest(
            request_id=f"{SEED_LABEL}/{prompt.prompt_id}/{index}",
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_token_ids=prompt.token_ids,
            seed=derive_seed(spec.seeds.root, SEED_LABEL, prompt.prompt_id, index),
        )
        for index in range(NUM_SAMPLES)
    )


def judge(prompt: Prompt, samples: Sequence[Sample], spec: RunSpec) -> Screened:
    """Score the samples of one prompt."""
    rewards = score_samples(samples, {prompt.prompt_id: prompt.label}, spec.reward)
    return Screened(
        prompt=prompt,
        rewards=tuple(rewards),
        lengths=tuple(len(sample.token_ids) for sample in samples),
        truncated=sum(sample.finish_reason == "length" for sample in samples),
        tokens_digest=root_digest(
            {s.request_id: digest_tokens(s.request_id, s.token_ids) for s in samples}
        ),
    )


def screen(spec: RunSpec, folder: Path, texts: Path | None) -> tuple[dict[str, Any], float]:
    """Start the engines, draw and judge all prompts; return the record's facts and the seconds."""
    run = new_run(spec, folder)
    with leg_session(spec, run_dir=run.folder, leg=SEED_LABEL, fence=run.fence) as opened:
        inputs = download.download.fn(opened.name)
        weights = convert.convert.fn(opened.name, inputs.model)
        train.start_engines.fn(opened.name, inputs.model, inputs.data, weights)
        trainer, rollout, prompts = opened.engines()
        _, _, unequal = push(trainer, rollout, version=0, flip=None, keep=None)
        if unequal:
            raise SpecError(f"the first push did not arrive: {unequal[0]}")
        started = time.perf_counter()
        screened: list[Screened] = []
        for first in range(0, len(prompts.prompts), PROMPTS_PER_CALL):
            chunk = prompts.prompts[first : first + PROMPTS_PER_CALL]
            requests = [request for prompt in chunk for request in requests_of(prompt, spec)]
            samples = rollout.generate(requests)
            for index, prompt in enumerate(chunk):
                own = samples[index * NUM_SAMPLES : (index + 1) * NUM_SAMPLES]
                screened.append(judge(prompt, own, spec))
                _show(screened[-1], time.perf_counter() - started)
            if texts is not None:
                _append_texts(texts, samples)
        seconds = time.perf_counter() - started
        return _facts(opened.spec, weights.digest, prompts.num_dropped_too_long, screened), seconds


def _facts(
    spec: RunSpec, weights_digest: str, num_dropped: int, screened: Sequence[Screened]
) -> dict[str, Any]:
    count = spec.plan.num_steps * spec.data.prompts_per_step
    rewards = [reward for row in screened for reward in row.rewards]
    return {
        "rule": RULE,
        "recipe": spec.recipe,
        "template": spec.data.template,
        "sampling": spec.sampling.model_dump(),
        "reward": spec.reward.model_dump(),
        "numerics": spec.numerics.model_dump(),
        "seeds": {"root": spec.seeds.root, "label": SEED_LABEL, "of": "root, label, id, index"},
        "data_sha256": spec.data.digest,
        "weights_digest": spec.model.weights_digest,
        "tokenizer_digest": spec.model.tokenizer_digest,
        "float32_root_digest": weights_digest,
        "trajectory": trajectory_fingerprint(spec),
        "dropped_too_long": num_dropped,
        "num_qualifying": sum(row.qualifies for row in screened),
        "reward_counts": dict(sorted(collections.Counter(map(str, rewards)).items())),
        "chosen": list(choose(screened, count=count)),
        "prompts": [row.to_dict() for row in screened],
    }


def _show(row: Screened, seconds: float) -> None:
    mark = "+" if row.qualifies else " "
    rewards = " ".join(f"{reward:.1f}" for reward in row.rewards)
    _say(f"{seconds:7.1f}s {mark} {row.prompt.prompt_id:10} {rewards}  cut {row.truncated}")


def _append_texts(path: Path, samples: Sequence[Sample]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            row = {"request_id": sample.request_id, "completion": sample.text}
            file.write(json.dumps(row, sort_keys=True) + "\n")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _command(recipe: str, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the words of the command, with folders of this machine left out."""
    folders = {"model.path": "MODEL_DIR", "data.source": "GSM8K_DIR"}
    yield from ("python", "tools/screen_prompts.py", recipe)
    for override in overrides:
        key, _, value = override.partition("=")
        yield from ("--set", f"{key}={folders.get(key, value)}")


def main() -> None:
    """Screen, print a line a prompt, write the record; exit 1 when too few prompts qualify."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--output", type=Path, required=True, help="record to write (JSON)")
    parser.add_argument("--texts", type=Path, help="also write completions here (JSON lines)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    spec = screening_spec(arguments.recipe, arguments.set)
    source = Path(__file__).read_bytes()
    guard.start()
    _say(RULE)
    with tempfile.TemporaryDirectory(prefix="screen-") as folder:
        facts, seconds = screen(spec, Path(folder), arguments.texts)
    facts |= {
        "command": " ".join(_command(arguments.recipe, arguments.set)),
        "tool_sha256": hashlib.sha256(source).hexdigest(),
        "seconds_drawing": round(seconds, 1),
    }
    write_json(arguments.output, facts)
    _say(f"{facts['num_qualifying']} of {len(facts['prompts'])} qualify; {facts['reward_counts']}")
    _say(f"chosen: {' '.join(facts['chosen']) or 'none, too few qualify'}")
    sys.exit(0 if facts["chosen"] else 1)


if __name__ == "__main__":
    main()
