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
    """Decides where the tensors of an update are kept, if at all."""

    folder: str
    from_step: int

    def path(self, step: int, update: int) -> str | None:
        """Folder for this update's tensors, or None."""
        if step < self.from_step:
            return None
        return f"{self.folder}/step-{step:06d}-{update}"


def initial_push(
    trainer: Trainer,
    rollout: RolloutEngine,
    *,
    keeper: TensorKeeper | None = None,
) -> StepOutcome:
    """Line 0 of a ledger: the initial weights and the first push."""
    weights = trainer.weight_digests()
    sent, received, violations = push(trainer, rollout, version=0, flip=None, keep=None)
    return StepOutcome(
        record=StepRecord(
            step=0,
            update=-1,
            digests={"weights": weights, "sent": sent, "received": received},
            violations=violations,
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
) -> Iterator[StepOutcome]:
    """Run steps `start + 1` to `stop`; yields one outcome an update.

    The engines must hold the weights of step `start`. `flip`, where given, flips one bit of one
    live value at its step.
    """
    for step in range(start + 1, stop + 1):
        yield from _step(
            trainer,
            rollout,
            spec,
            prompts,
            step=step,
            commit=commit,
            keeper=keeper,
            flip=flip if flip is not None and flip.step == step else None,
        )


def _step(
    trainer: Trainer,
    rollout: RolloutEngine,
    spec: RunSpec,
    prompts: PromptSet,
    *,
    step: int,
    commit: Commit,
    keeper: TensorKeeper | None,
    flip: Flip | None,
) -> Iterator[StepOutcome]:
    clock = _Clock()
    chosen = [prompts.prompts[i] for i in prompt_order(len(prompts.prompts), spec, step)]
    requests = sample_requests(chosen, spec, step)
    drawn = _flip_samples(tuple(rollout.generate(requests)), flip)
    clock.lap("perf/generate_s")
    labels = {prompt.prompt_id: prompt.label for prompt in chosen}
    scored = score_samples(drawn, labels, spec.reward, metadata=metadata_of(chosen))
    rewards = _flip_values(scored, drawn, flip, "rewards")
    selection = select_groups(_groups(rewards, spec), wanted=spec.data.prompts_per_step)
    kept = selection.samples(spec.sampling.samples_per_prompt)
    samples = tuple(drawn[index] for index in kept)
    advantages = _advantages([rewards[index] for index in kept], spec, step)
    advantage_values = _flip_values(advantages.values, samples, flip, "advantages")
    train_samples = _train_samples(samples, advantage_values, spec)
    clock.lap("perf/reward_s")

    commit(step, "train_logprobs", trainer.score(train_samples, flip=flip))
    scores = trainer.scores()
    clock.lap("perf/score_s")
    gate = compare_logprobs(step, samples, scores)
    by_id = dict(zip((s.request_id for s in samples), advantage_values, strict=True))
    values = _sample_values(chosen, drawn, rewards, by_id, scores)
    rows = _table(step, chosen, drawn, rewards, by_id, gate)
    metrics = {
        **_step_metrics(drawn, rewards, selection, gate),
        **mismatch_metrics(samples, scores, tis_clip=spec.loss.tis_clip),
        **(selection.metrics() if spec.sampling.oversample > 1 else {}),
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
        on_report = spec.plan.gates.logprobs == "report"
        violations = gate.violations(on_report=on_report) if update == 0 else ()
        if update == num_updates - 1:
            sent, received, unequal = push(trainer, rollout, version=step, flip=flip, keep=keep)
            digests |= {"sent": sent, "received": received}
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
            groups_with_variance=advantages.groups_with_variance if update == 0 else 0,
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
    buckets, sent = trainer.send(version=version, flip=flip, keep_to=keep)
    received = rollout.receive(buckets, version=version, flip=flip, keep_to=keep)
    unequal = sorted(
        name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name)
    )
    violations = tuple(
        f"sent != received: version {version}, tensor {name}: sent {sent.get(name)}, "
        f"received {received.get(name)}"
        for name in unequal
    )
    return sent, received, violations


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
        TrainSample(
            request_id=sample.request_id,
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=sample.token_ids,
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
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    rewards: Sequence[float],
    advantages: Mapping[str, float],
    scores: Mapping[str, Sequence[float]],
) -> dict[str, dict[str, list[Any]]]:
    """Probe -> name -> values, in the shape that the ledger's side file keeps.

    What was drawn is there whether it is trained on or not; advantages and train log-probs are
    those of the samples that are.
    """
    ids = [sample.request_id for sample in samples]
    return {
        "prompts": {prompt.prompt_id: list(prompt.token_ids) for prompt in prompts},
        "tokens": {sample.request_id: list(sample.token_ids) for sample in samples},
        "rollout_logprobs": {sample.request_id: list(sample.logprobs) for sample in samples},
        "rewards": {name: [value] for name, value in zip(ids, rewards, strict=True)},
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
    step: int,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    rewards: Sequence[float],
    advantages: Mapping[str, float],
    gate: StepGate,
) -> tuple[Mapping[str, Any], ...]:
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    return tuple(
        {
            "step": step,
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
            "worst_logprob_diff": gate.worst_by_request.get(sample.request_id, math.nan),
        }
        for sample, reward in zip(samples, rewards, strict=True)
    )


def _step_metrics(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    selection: Selection,
    gate: StepGate,
) -> dict[str, float]:
    """Figures of all that was drawn, and of the gate over what is trained on."""
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
