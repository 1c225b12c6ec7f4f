"""Laws of the log-prob gate: bits, not closeness; red by name; vacuous with nothing at stake."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.contracts import Sample
from engines.gates.logprobs import LogprobGate, StepGate, compare_logprobs
from engines.provenance.verdict import Verdict

STAKES = {"groups_with_variance": 1, "max_grad_norm": 0.5, "changed_weights": 3}


def sample(name: str, logprobs: list[float]) -> Sample:
    return Sample(
        request_id=name,
        prompt_id=name.split("/")[1],
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=tuple(range(10, 10 + len(logprobs))),
        logprobs=tuple(logprobs),
        text="",
        finish_reason="length",
    )


SAMPLES = (sample("1/p0/0", [-0.5, -1.25]), sample("1/p1/0", [-2.0, -0.0, -3.5]))
SCORES = {each.request_id: each.logprobs for each in SAMPLES}


def judged(step_gate: StepGate, **stakes: float) -> Verdict:
    gate = LogprobGate()
    gate.add(step_gate)
    return gate.final(**(STAKES | stakes)).verdict  # type: ignore[arg-type]


def test_equal_bits_are_aligned_at_exactly_zero() -> None:
    gate = LogprobGate()
    step_gate = compare_logprobs(1, SAMPLES, SCORES)
    gate.add(step_gate)
    assert step_gate.violations() == ()
    assert (step_gate.num_tokens, step_gate.num_exact, step_gate.exact_fraction) == (5, 5, 1.0)
    assert (step_gate.max_abs_diff, step_gate.mean_abs_diff, step_gate.p999_abs_diff) == (0, 0, 0)
    assert step_gate.worst is None
    result = gate.final(**STAKES)  # type: ignore[arg-type]
    assert result.verdict is Verdict.ALIGNED
    assert result.reason == "5 of 5 log-probs have equal bits"
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["verdict"] == "Aligned"


def test_one_bit_of_one_token_is_misaligned_and_located() -> None:
    near = float(np.nextafter(np.float32(-3.5), np.float32(0)))
    step_gate = compare_logprobs(1, SAMPLES, SCORES | {"1/p1/0": (-2.0, -0.0, near)})
    assert (step_gate.num_exact, step_gate.max_abs_diff) == (4, near + 3.5)
    assert step_gate.mean_abs_diff == (near + 3.5) / 5
    worst = step_gate.worst
    assert worst is not None
    assert (worst.prompt_id, worst.position, worst.token_id) == ("p1", 2, 12)
    assert (worst.rollout, worst.trainer) == (-3.5, near)
    assert step_gate.worst_by_request == {"1/p0/0": 0.0, "1/p1/0": near + 3.5}
    assert "1 of 5 log-probs differ" in step_gate.violations()[0]
    assert "prompt p1 (1/p1/0) position 2 token 12" in step_gate.violations()[0]
    assert judged(step_gate) is Verdict.MISALIGNED


def test_signed_zeros_are_not_equal_although_their_difference_is_zero() -> None:
    step_gate = compare_logprobs(1, SAMPLES, SCORES | {"1/p1/0": (-2.0, 0.0, -3.5)})
    assert step_gate.max_abs_diff == 0.0
    assert step_gate.num_exact == 4
    assert step_gate.worst is not None
    assert step_gate.worst.position == 1
    assert judged(step_gate) is Verdict.MISALIGNED


def test_more_bits_than_float32_on_one_side_do_not_hide() -> None:
    step_gate = compare_logprobs(1, SAMPLES, SCORES | {"1/p0/0": (-0.5 + 1e-12, -1.25)})
    assert step_gate.max_abs_diff == pytest.approx(1e-12, rel=1e-3)
    assert judged(step_gate) is Verdict.MISALIGNED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", ["rollout", "trainer", "both"])
def test_a_nan_or_an_infinity_on_any_side_is_misaligned(value: float, sides: str) -> None:
    drawn = SAMPLES
    scores: dict = dict(SCORES)
    if sides != "trainer":
        drawn = (sample("1/p0/0", [-0.5, value]), SAMPLES[1])
    if sides != "rollout":
        scores["1/p0/0"] = (-0.5, value)
    step_gate = compare_logprobs(1, drawn, scores)
    assert step_gate.num_nonfinite == 1
    assert step_gate.num_exact == 4
    assert step_gate.max_abs_diff != 0.0
    assert step_gate.worst is not None
    assert (step_gate.worst.request_id, step_gate.worst.position) == ("1/p0/0", 1)
    assert judged(step_gate) is Verdict.MISALIGNED
    json.dumps(step_gate.to_dict(), allow_nan=False)


def test_a_nan_is_the_worst_token_and_survives_into_the_window() -> None:
    gate = LogprobGate()
    scores = SCORES | {"1/p0/0": (-0.5, math.nan), "1/p1/0": (9.0, 9.0, 9.0)}
    gate.add(compare_logprobs(1, SAMPLES, scores))
    gate.add(compare_logprobs(2, SAMPLES, SCORES))
    assert gate.steps[0].worst is not None
    assert gate.steps[0].worst.request_id == "1/p0/0"
    assert math.isnan(gate.final(**STAKES).max_abs_diff)  # type: ignore[arg-type]
    # And is red where values may differ.
    (fault,) = gate.faults
    assert "step 1: 4 of 5 log-probs differ, max nan" in fault
    assert (
        compare_logprobs(1, SAMPLES, SCORES | {"1/p0/0": (-0.5, 1.0)}).violations(on_report=True)
        == ()
    )


def test_missing_extra_doubled_and_short_answers_are_misaligned_by_name() -> None:
    cases = {
        "request 1/p1/0 was not scored": (SAMPLES, {"1/p0/0": SCORES["1/p0/0"]}),
        "request 1/p9/0 was scored but never drawn": (SAMPLES, SCORES | {"1/p9/0": (-1.0,)}),
        "request 1/p0/0 was answered twice": ((*SAMPLES, SAMPLES[0]), SCORES),
        "request 1/p0/0 has 2 tokens, 2 rollout log-probs and 1 trainer": (
            SAMPLES,
            SCORES | {"1/p0/0": (-0.5,)},
        ),
    }
    for text, (drawn, scores) in cases.items():
        step_gate = compare_logprobs(4, drawn, scores)
        assert step_gate.num_exact == step_gate.num_tokens
        assert f"gate: step 4: {text}" in step_gate.violations()[0]
        assert judged(step_gate) is Verdict.MISALIGNED


@given(order=st.permutations(range(4)), data=st.data())
def test_the_order_of_samples_and_scores_does_not_matter(
    order: list[int], data: st.DataObject
) -> None:
    drawn = [sample(f"1/p{i}/0", [-0.5 * i, -1.0]) for i in range(4)]
    scores = {
        each.request_id: (each.logprobs[0] + 0.1 * (i % 2), -1.0) for i, each in enumerate(drawn)
    }
    names = data.draw(st.permutations(sorted(scores)))
    permuted = compare_logprobs(
        1, [drawn[i] for i in order], {name: scores[name] for name in names}
    )
    assert permuted == compare_logprobs(1, drawn, scores)


def test_the_percentile_is_an_observed_value() -> None:
    logprobs = [-1.0] * 2000
    scores = [-1.0] * 1997 + [-1.5, -1.25, -3.0]
    step_gate = compare_logprobs(1, [sample("1/p/0", logprobs)], {"1/p/0": scores})
    assert step_gate.p999_abs_diff == 0.5
    assert step_gate.max_abs_diff == 2.0


def test_a_window_with_nothing_at_stake_is_vacuous_and_says_why() -> None:
    equal = compare_logprobs(1, SAMPLES, SCORES)
    assert judged(equal, groups_with_variance=0) is Verdict.VACUOUS
    assert judged(equal, max_grad_norm=0.0) is Verdict.VACUOUS
    assert judged(equal, changed_weights=0) is Verdict.VACUOUS
    assert judged(compare_logprobs(1, [], {})) is Verdict.VACUOUS
    result = LogprobGate().final(**STAKES)  # type: ignore[arg-type]
    assert (result.verdict, result.reason) == (Verdict.VACUOUS, "no token was compared in 0 steps")
    assert judged(equal, max_grad_norm=math.nan) is Verdict.MISALIGNED
    red = compare_logprobs(1, SAMPLES, {})
    assert judged(red, groups_with_variance=0) is Verdict.MISALIGNED


def test_one_step_without_variance_does_not_make_the_window_vacuous() -> None:
    gate = LogprobGate()
    for step in (1, 2):
        gate.add(compare_logprobs(step, SAMPLES, SCORES))
    result = gate.final(**STAKES)  # type: ignore[arg-type]
    assert (result.verdict, result.num_steps, result.num_tokens) == (Verdict.ALIGNED, 2, 10)
