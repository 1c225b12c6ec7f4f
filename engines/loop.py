"""The training loop: one step is one rollout with its pushed weights, then its optimizer updates.

Torch-free; it moves references and small records only. It owns no file: what must be written
between two calls (the blind commitment of the trainer's scores) goes through `commit`, and what a
step left behind is yielded. Nothing is taken in completion order.

    for outcome in steps(trainer, rollout, spec, prompts, start=0, stop=8, commit=ledger.commit):
        ledger.append(outcome.record, outcome.values)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engines.contracts import (
    Flip,
    Prompt,
    PromptSet,
    RolloutEngine,
    Sample,
    SampleRequest,
    StepRecord,
    Trainer,
    TrainSample,
    UpdateRecord,
)
from engines.data import prompt_order
from engines.faults import choose_name, flip_float32, flip_int
from engines.gates.logprobs import StepGate, compare_logprobs
from engines.gates.mismatch import mismatch_metrics
from engines.group_selection import Selection, select_groups
from engines.provenance.digest import digest_floats, digest_tokens
from engines.rewards import metadata_of, score_samples
from engines.seeds import derive_seed
from engines.train.advantages import Advantages, group_advantages
from model_specs.errors import SpecError
from model_specs.run_spec import RunSpec

Commit = Callable[[int, str, str], None]
Values = Mapping[str, Mapping[str, list[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One update, with the values behind its sample digests and the gate of its step."""

    record: StepRecord
    values: Values = field(default_factory=dict)
    gate: StepGate | None = None
    groups_with_variance: int = 0
    changed_weights: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKeeper:
    """Says where the tensors of an update are kept."""

    folder: str

    def path(self, step: int, update: int) -> str:
        """Folder for this update's tensors."""
        return f"{self.folder}/step-{step:06d}-{update}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """One rollout with its rewards and advantages: all that the updates of its step need."""

    step: int
    prompts: tuple[Prompt, ...]
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    """One a sample, float32 values."""
    advantages: tuple[float, ...]
    """One a sample that is trained on (`engines.group_selection`), float32 values."""
    groups_with_variance: int


def initial_push(
    trainer: Trainer,
    rollout: RolloutEngine | None,
    *,
    step: int = 0,
    state_digest: str | None = None,
) -> StepOutcome:
    """First line of a ledger: the weights that a leg begins with and their first push.

    Args:
        trainer: Holds the weights of `step`.
        rollout: None where nothing is drawn.
        step: 0, or the step of the checkpoint that a leg of its own begins with.
        state_digest: Of weights, optimizer state and progress; recorded under `optimizer`.
    """
    digests: dict[str, Mapping[str, str]] = {"weights": trainer.weight_digests()}
    if state_digest is not None:
        digests["optimizer"] = {"state": state_digest}
    pushed, violations = _pushed(trainer, rollout, version=step, flip=None, keep=None)
    return StepOutcome(
        record=StepRecord(
            step=step, update=-1, digests={**digests, **pushed}, violations=violations
        )
    )


def steps(
    trainer: Trainer,
    rollout: RolloutEngine,
    spec: RunSpec,
    prompts: PromptSet,
    *,
    start: int,
    stop: int,
    commit: Commit,
    keeper: TensorKeeper | None = None,
    flip: Flip | None = None,
    on_drawn: Callable[[DrawnStep], None] | None = None,
) -> Iterator[StepOutcome]:
    """Run steps `start + 1` to `stop`; yields one outcome an update.

    The engines must hold the weights of step `start`. `flip`, where given, flips one bit of one
    live value at its step. `on_drawn` is given each step's rollout before it is trained on.
    """
    for step in range(start + 1, stop + 1):
        clock = _Clock()
        flipped = flip if flip is not None and flip.step == step else None
        drawn = draw_step(rollout, spec, prompts, step=step, flip=flipped, clock=clock)
        if on_drawn is not None:
            on_drawn(drawn)
        yield from train_step(
            trainer,
            rollout,
            spec,
            drawn,
            commit=commit,
            keeper=keeper,
            flip=flipped,
            clock=clock,
        )


def draw_step(
    rollout: RolloutEngine,
    spec: RunSpec,
    prompts: PromptSet,
    *,
    step: int,
    flip: Flip | None = None,
    clock: _Clock | None = None,
) -> DrawnStep:
    """Draw and reward the samples of a step at the weights that the engine holds."""
    clock = clock or _Clock()
    chosen = [prompts.prompts[i] for i in prompt_order(len(prompts.prompts), spec, step)]
    requests = sample_requests(chosen, spec, step)
    drawn = _flip_samples(tuple(rollout.generate(requests)), flip)
    clock.lap("perf/generate_s")
    labels = {prompt.prompt_id: prompt.label for prompt in chosen}
    scored = score_samples(drawn, labels, spec.reward, metadata=metadata_of(chosen))
    rewards = _flip_values(scored, drawn, flip, "rewards")
    kept = _selection(rewards, spec).samples(spec.sampling.samples_per_prompt)
    samples = [drawn[index] for index in kept]
    advantages = _advantages([rewards[index] for index in kept], spec, step)
    advantage_values = _flip_values(advantages.values, samples, flip, "advantages")
    clock.lap("perf/reward_s")
    return DrawnStep(
        step=step,
        prompts=tuple(chosen),
        samples=drawn,
        rewards=tuple(rewards),
        advantages=advantage_values,
        groups_with_variance=advantages.groups_with_variance,
    )


def train_step(
    trainer: Trainer,
    rollout: RolloutEngine | None,
    spec: RunSpec,
    drawn: DrawnStep,
    *,
    commit: Commit,
    keeper: TensorKeeper | None = None,
    flip: Flip | None = None,
    clock: _Clock | None = None,
) -> Iterator[StepOutcome]:
    """Score a rollout, judge it at the gate and run its updates; yields one outcome an update.

    Without a rollout engine the weights are sent to nobody: there is no digest of what was
    received.
    """
    clock = clock or _Clock()
    step = drawn.step
    kept = _selection(drawn.rewards, spec).samples(spec.sampling.samples_per_prompt)
    samples = [drawn.samples[index] for index in kept]
    train_samples = _train_samples(samples, drawn.advantages, spec)
    commit(step, "train_logprobs", trainer.score(train_samples, flip=flip))
    scores = trainer.scores()
    clock.lap("perf/score_s")
    gate = compare_logprobs(step, samples, scores)
    by_id = dict(zip((s.request_id for s in samples), drawn.advantages, strict=True))
    values = _sample_values(drawn, by_id, scores)
    rows = _table(drawn, by_id, gate)
    metrics = {
        **rollout_metrics(drawn, spec),
        **_gate_metrics(gate),
        **mismatch_metrics(samples, scores, tis_clip=spec.loss.tis_clip),
    }
    train_samples = _with_behaviour(train_samples, samples, spec)
    clock.lap("perf/gate_s")

    first_digests = _sample_digests(values)
    per_update = spec.samples_per_update
    num_updates = spec.loss.updates_per_step
    for update in range(num_updates):
        batch = train_samples[update * per_update : (update + 1) * per_update]
        keep = keeper.path(step, update) if keeper else None
        record = trainer.update(batch, step=step, update=update, flip=flip, keep_to=keep)
        clock.lap("perf/update_s")
        digests = {**(first_digests if update == 0 else {}), **record.digests}
        on_report = spec.plan.gates.logprobs != "required"
        violations = gate.violations(on_report=on_report) if update == 0 else ()
        if update == num_updates - 1:
            pushed, unequal = _pushed(trainer, rollout, version=step, flip=flip, keep=keep)
            digests |= pushed
            violations += unequal
            clock.lap("perf/push_s")
        yield StepOutcome(
            record=StepRecord(
                step=step,
                update=update,
                digests=digests,
                metrics=_update_metrics(metrics if update == 0 else {}, record, clock),
                samples=rows if update == 0 else (),
                violations=violations,
            ),
            values=values if update == 0 else {},
            gate=gate if update == 0 else None,
            groups_with_variance=drawn.groups_with_variance if update == 0 else 0,
            changed_weights=record.changed_weights,
        )


def sample_requests(
    prompts: Sequence[Prompt], spec: RunSpec, step: int
) -> tuple[SampleRequest, ...]:
    """One request a sample, prompt by prompt; each seed is a hash of what the draw is for."""
    return tuple(
        SampleRequest(
            request_id=f"{step}/{prompt.prompt_id}/{index}",
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_token_ids=prompt.token_ids,
            seed=derive_seed(spec.seeds.root, "sample", step, prompt.prompt_id, index),
        )
        for prompt in prompts
        for index in range(spec.sampling.samples_per_prompt)
    )


def push(
    trainer: Trainer,
    rollout: RolloutEngine,
    *,
    version: int,
    flip: Flip | None,
    keep: str | None,
) -> tuple[Mapping[str, str], Mapping[str, str], tuple[str, ...]]:
    """Send the weights; return sent and received digests and where they are not equal."""
    sent, received = trainer.push(rollout, version=version, flip=flip, keep_to=keep)
    unequal = sorted(
        name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name)
    )
    violations = tuple(
        f"sent != received: version {version}, tensor {name}: sent {sent.get(name)}, "
        f"received {received.get(name)}"
        for name in unequal
    )
    return sent, received, violations


def _pushed(
    trainer: Trainer,
    rollout: RolloutEngine | None,
    *,
    version: int,
    flip: Flip | None,
    keep: str | None,
) -> tuple[dict[str, Mapping[str, str]], tuple[str, ...]]:
    """Probe -> name -> digest of a push, and where sent and received are not equal."""
    if rollout is None:
        _, sent = trainer.send(version=version, flip=flip, keep_to=keep)
        return {"sent": sent}, ()
    sent, received, unequal = push(trainer, rollout, version=version, flip=flip, keep=keep)
    return {"sent": sent, "received": received}, unequal


def _selection(rewards: Sequence[float], spec: RunSpec) -> Selection:
    """Which groups are trained on: a function of the rewards alone."""
    return select_groups(_groups(rewards, spec), wanted=spec.data.prompts_per_step)


def _groups(rewards: Sequence[float], spec: RunSpec) -> list[Sequence[float]]:
    """Rewards prompt by prompt."""
    size = spec.sampling.samples_per_prompt
    return [rewards[first : first + size] for first in range(0, len(rewards), size)]


def _advantages(rewards: Sequence[float], spec: RunSpec, step: int) -> Advantages:
    return group_advantages(
        _groups(rewards, spec),
        spec.loss,
        seed=derive_seed(spec.seeds.root, "advantage_transform", step),
    )


def _train_samples(
    samples: Sequence[Sample], advantages: Sequence[float], spec: RunSpec
) -> tuple[TrainSample, ...]:
    return tuple(
        TrainSample.of(
            sample,
            advantage=advantage,
            masked=spec.loss.mask_truncated and sample.finish_reason == "length",
        )
        for sample, advantage in zip(samples, advantages, strict=True)
    )


def _with_behaviour(
    train_samples: Sequence[TrainSample], samples: Sequence[Sample], spec: RunSpec
) -> tuple[TrainSample, ...]:
    """After the blind score: give the rollout's log-probs to a loss that corrects by them."""
    if spec.loss.tis_clip is None:
        return tuple(train_samples)
    return tuple(
        replace(train_sample, rollout_logprobs=sample.logprobs)
        for train_sample, sample in zip(train_samples, samples, strict=True)
    )


def _flip_samples(samples: tuple[Sample, ...], flip: Flip | None) -> tuple[Sample, ...]:
    if flip is None or flip.probe not in ("tokens", "rollout_logprobs"):
        return samples
    name = choose_name([sample.request_id for sample in samples], flip)
    flipped = []
    for sample in samples:
        if sample.request_id == name and flip.probe == "tokens":
            ids = list(sample.token_ids)
            _check_element(flip, len(ids))
            ids[flip.element] = flip_int(ids[flip.element], flip.bit)
            sample = replace(sample, token_ids=tuple(ids))
        elif sample.request_id == name:
            logprobs = list(sample.logprobs)
            _check_element(flip, len(logprobs))
            logprobs[flip.element] = flip_float32(logprobs[flip.element], flip.bit)
            sample = replace(sample, logprobs=tuple(logprobs))
        flipped.append(sample)
    return tuple(flipped)


def _flip_values(
    values: Sequence[float], samples: Sequence[Sample], flip: Flip | None, probe: str
) -> tuple[float, ...]:
    """Flip one sample's float32 value; rewards and advantages are one value a sample."""
    if flip is None or flip.probe != probe:
        return tuple(values)
    name = choose_name([sample.request_id for sample in samples], flip)
    _check_element(flip, 1)
    return tuple(
        flip_float32(value, flip.bit) if sample.request_id == name else value
        for value, sample in zip(values, samples, strict=True)
    )


def _check_element(flip: Flip, length: int) -> None:
    if flip.element >= length:
        raise SpecError(
            f"flip of {flip.probe} at step {flip.step}: element {flip.element} of a sample that "
            f"has {length}; name an element below that"
        )


def _sample_values(
    drawn: DrawnStep,
    advantages: Mapping[str, float],
    scores: Mapping[str, Sequence[float]],
) -> dict[str, dict[str, list[Any]]]:
    """Probe -> name -> values, in the shape that the ledger's side file keeps.

    What was drawn is there whether it is trained on or not; advantages and train log-probs are
    those of the samples that are.
    """
    samples = drawn.samples
    ids = [sample.request_id for sample in samples]
    return {
        "prompts": {prompt.prompt_id: list(prompt.token_ids) for prompt in drawn.prompts},
        "tokens": {sample.request_id: list(sample.token_ids) for sample in samples},
        "rollout_logprobs": {sample.request_id: list(sample.logprobs) for sample in samples},
        "rewards": {name: [value] for name, value in zip(ids, drawn.rewards, strict=True)},
        "advantages": {name: [advantages[name]] for name in ids if name in advantages},
        "train_logprobs": {name: list(scores[name]) for name in ids if name in scores},
    }


def _sample_digests(values: Values) -> dict[str, dict[str, str]]:
    return {
        probe: {
            name: digest_tokens(name, row)
            if probe in ("prompts", "tokens")
            else digest_floats(name, row)
            for name, row in rows.items()
        }
        for probe, rows in values.items()
    }


def _table(
    drawn: DrawnStep, advantages: Mapping[str, float], gate: StepGate
) -> tuple[Mapping[str, Any], ...]:
    by_id = {prompt.prompt_id: prompt for prompt in drawn.prompts}
    return tuple(
        {
            "step": drawn.step,
            "request_id": sample.request_id,
            "prompt_id": sample.prompt_id,
            "prompt": by_id[sample.prompt_id].text,
            "completion": sample.text,
            "label": by_id[sample.prompt_id].label,
            "reward": reward,
            "advantage": advantages.get(sample.request_id, 0.0),
            "used": sample.request_id in advantages,
            "length": len(sample.token_ids),
            "finish_reason": sample.finish_reason,
            "worst_logprob_diff": gate.worst_by_request.get(sample.request_id),
        }
        for sample, reward in zip(drawn.samples, drawn.rewards, strict=True)
    )


def rollout_metrics(drawn: DrawnStep, spec: RunSpec) -> dict[str, float]:
    """Metric name -> value of all that was drawn and rewarded, trained on or not."""
    rewards, samples = drawn.rewards, drawn.samples
    selection = _selection(drawn.rewards, spec)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    lengths = [len(sample.token_ids) for sample in samples]
    truncated = sum(sample.finish_reason == "length" for sample in samples)
    equal_groups = selection.num_drawn - selection.num_with_variance
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(variance),
        "reward/zero_std_groups": float(equal_groups),
        "rollout/response_length/mean": sum(lengths) / len(lengths),
        "rollout/response_length/max": float(max(lengths)),
        "rollout/truncated_ratio": truncated / len(samples),
        **(selection.metrics() if spec.sampling.oversample > 1 else {}),
    }


def _gate_metrics(gate: StepGate) -> dict[str, float]:
    return {
        "gate/logprob_abs_diff/max": gate.max_abs_diff,
        "gate/logprob_abs_diff/mean": gate.mean_abs_diff,
        "gate/logprob_abs_diff/p999": gate.p999_abs_diff,
        "gate/exact_fraction": gate.exact_fraction,
        "gate/num_tokens": float(gate.num_tokens),
        "train/train_rollout_logprob_abs_diff": gate.mean_abs_diff,
    }


def _update_metrics(
    step_metrics: Mapping[str, float], record: UpdateRecord, clock: _Clock
) -> dict[str, float]:
    return {**step_metrics, **record.metrics, **clock.laps}


class _Clock:
    """Seconds by phase: for looking at, never compared."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._last = self.started
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self.laps["perf/step_s"] = now - self.started
        self._last = now
