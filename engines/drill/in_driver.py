"""Faults in the driver's process: in its loop, in what it is given, and in files.

What each does and what catches it is in `engines.drill.catalogue`.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import engines.drill.bench as bench_module
import engines.loop as loop
import engines.provenance.ledger as ledger_module
import engines.rewards as rewards_module
from engines.contracts import Sample
from engines.drill.bench import AWAY_STEP, START_STEP, Bench
from engines.drill.live import replaced
from engines.provenance.descent import natural_order
from engines.provenance.fence import RunFolder
from engines.provenance.side_files import encode_value

Breaker = Iterator[None]
Samples = tuple[Sample, ...]


# -- data and draws


@contextmanager
def data_cursor_off_by_one(bench: Bench) -> Breaker:
    honest = loop.prompt_order
    with replaced(loop, "prompt_order", lambda number, spec, step: honest(number, spec, step + 1)):
        yield


@contextmanager
def seed_reused(bench: Bench) -> Breaker:
    """All samples of a prompt are drawn from the seed of its first."""
    honest = loop.derive_seed
    with replaced(
        loop, "derive_seed", lambda *labels: honest(*(labels[:-1] if len(labels) == 5 else labels))
    ):
        yield


@contextmanager
def completion_order_batch(bench: Bench) -> Breaker:
    """Samples are taken in the order in which they ended."""
    honest = bench.rollout.generate

    def as_completed(requests: Any) -> Samples:
        return tuple(sorted(honest(requests), key=lambda sample: len(sample.token_ids)))

    with replaced(bench.rollout, "generate", as_completed):
        yield


@contextmanager
def other_root_seed(bench: Bench) -> Breaker:
    other = bench.spec.seeds.model_copy(update={"root": bench.spec.seeds.root + 1})
    with replaced(bench, "spec", bench.spec.model_copy(update={"seeds": other})):
        yield


# -- rewards and advantages


@contextmanager
def _rewards(change: Callable[[Samples, list[float]], list[float]]) -> Breaker:
    honest = loop.score_samples

    def changed(samples: Samples, *args: Any, **options: Any) -> tuple[float, ...]:
        return tuple(change(samples, list(honest(samples, *args, **options))))

    with replaced(loop, "score_samples", changed):
        yield


@contextmanager
def reward_of_the_wrong_sample(bench: Bench) -> Breaker:
    def exchanged(samples: Samples, rewards: list[float]) -> list[float]:
        order = sorted(range(len(samples)), key=lambda i: natural_order(samples[i].request_id))
        first = order[0]
        other = next(i for i in order if rewards[i] != rewards[first])
        rewards[first], rewards[other] = rewards[other], rewards[first]
        return rewards

    with _rewards(exchanged):
        yield


@contextmanager
def equal_rewards(bench: Bench) -> Breaker:
    with _rewards(lambda samples, rewards: [0.5] * len(rewards)):
        yield


@contextmanager
def reward_that_remembers(bench: Bench) -> Breaker:
    calls, honest = count(), rewards_module.REWARDS["digits"]

    def remembering(*args: Any, **options: Any) -> float:
        return honest(*args, **options) * (1 - 2**-10 * (next(calls) % 2))

    with replaced(rewards_module, "REWARDS", {"digits": remembering}):
        yield


@contextmanager
def advantage_of_the_wrong_group(bench: Bench) -> Breaker:
    honest = loop.group_advantages

    def shifted(rewards: Sequence[Sequence[float]], *args: Any, **options: Any) -> Any:
        found = honest(rewards, *args, **options)
        size = len(rewards[0])
        return replace(found, values=(*found.values[size:], *found.values[:size]))

    with replaced(loop, "group_advantages", shifted):
        yield


@contextmanager
def group_of_one(bench: Bench) -> Breaker:
    honest = loop.group_advantages

    def alone(rewards: Sequence[Sequence[float]], *args: Any, **options: Any) -> Any:
        return honest([[reward] for group in rewards for reward in group], *args, **options)

    with replaced(loop, "group_advantages", alone):
        yield


# -- the gate and the push


@contextmanager
def gate_given_the_rollouts_own_log_probs(bench: Bench) -> Breaker:
    """The rollout is wrong by an ULP, and the gate compares it with itself."""
    seen: dict[str, tuple[float, ...]] = {}
    generate, scores = bench.rollout.generate, bench.trainer.scores

    def drawn(requests: Any) -> Samples:
        samples = tuple(
            replace(s, logprobs=tuple(float(np.nextafter(np.float32(v), -9)) for v in s.logprobs))
            for s in generate(requests)
        )
        seen.update({sample.request_id: sample.logprobs for sample in samples})
        return samples

    with (
        replaced(bench.rollout, "generate", drawn),
        replaced(bench.trainer, "scores", lambda: {name: seen[name] for name in scores()}),
    ):
        yield


# -- evidence and files


@contextmanager
def infinity_clamped_by_a_store(bench: Bench) -> Breaker:
    generate = bench.rollout.generate

    def with_infinity(requests: Any) -> Samples:
        samples = generate(requests)
        first = min((sample.request_id for sample in samples), key=natural_order)
        return tuple(
            replace(s, logprobs=(-math.inf, *s.logprobs[1:])) if s.request_id == first else s
            for s in samples
        )

    def clamped(value: Any) -> Any:
        largest = float(np.finfo(np.float32).max)
        return encode_value(max(value, -largest) if isinstance(value, float) else value)

    with (
        replaced(bench.rollout, "generate", with_infinity),
        replaced(ledger_module, "encode_value", clamped),
    ):
        yield


@contextmanager
def ledger_edited_afterwards(bench: Bench) -> Breaker:
    """A root of the last line is replaced by another before the ledger is verified."""
    honest = bench_module.verify_ledger

    def edited(folder: Path) -> Any:
        path = folder / ledger_module.LEDGER_FILE
        *lines, last = path.read_text(encoding="utf-8").splitlines()
        row = json.loads(last)
        row["roots"]["grads"] = row["roots"]["weights"]
        path.write_text("\n".join([*lines, json.dumps(row)]) + "\n", encoding="utf-8")
        return honest(folder)

    with replaced(bench_module, "verify_ledger", edited):
        yield


@contextmanager
def newer_attempt_has_started(bench: Bench) -> Breaker:
    """While the first step is drawn, the run is opened again elsewhere."""
    honest = bench.rollout.generate

    def overtaken(requests: Any) -> Samples:
        newest = max((bench.folder / "legs").iterdir())
        RunFolder.open(newest).new_attempt()
        return honest(requests)

    with replaced(bench.rollout, "generate", overtaken):
        yield


@contextmanager
def _checkpoint(bench: Bench, name: str, change: Callable[[Path], None]) -> Breaker:
    """Resume from a copy of the checkpoint that was changed after it was written."""
    honest = bench.checkpoints[START_STEP]
    copy = bench.folder / "broken" / name
    shutil.copytree(honest.uri, copy, dirs_exist_ok=True)
    change(copy)
    broken = {**bench.checkpoints, START_STEP: replace(honest, uri=str(copy))}
    with replaced(bench, "checkpoints", broken):
        yield


@contextmanager
def checkpoint_of_the_previous_step(bench: Bench) -> Breaker:
    """The place of the checkpoint holds the whole checkpoint of the step before."""
    older = bench.checkpoints[AWAY_STEP]
    mixed = replace(bench.checkpoints[START_STEP], uri=older.uri)
    with replaced(bench, "checkpoints", {**bench.checkpoints, START_STEP: mixed}):
        yield


@contextmanager
def torn_file(bench: Bench) -> Breaker:
    def truncated(folder: Path) -> None:
        path = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
        path.write_bytes(path.read_bytes()[:-4096])

    with _checkpoint(bench, "torn", truncated):
        yield


@contextmanager
def checkpoint_without_its_last_file(bench: Bench) -> Breaker:
    with _checkpoint(bench, "unfinished", lambda folder: (folder / "meta.json").unlink()):
        yield


@contextmanager
def bit_rot_in_a_checkpoint(bench: Bench) -> Breaker:
    def flipped(folder: Path) -> None:
        path = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))

    with _checkpoint(bench, "rotten", flipped):
        yield


@contextmanager
def checkpoint_of_another_run(bench: Bench) -> Breaker:
    def foreign(folder: Path) -> None:
        path = folder / "meta.json"
        meta = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(meta | {"trajectory": "0" * 32}), encoding="utf-8")

    with _checkpoint(bench, "foreign", foreign):
        yield
