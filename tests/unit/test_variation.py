"""What leg b is run under is declared, drawn outside of the trajectory, and changes nothing."""

from __future__ import annotations

import random
import time

import pytest

from engines.contracts import Sample
from engines.delays import pause, take_pauses
from engines.plan import segment_stops, with_middle_checkpoint
from engines.rewards import score_samples
from model_specs.errors import SpecError
from model_specs.fingerprint import plan_fingerprint, trajectory_fingerprint
from model_specs.recipes.tiny_cpu import recipe
from model_specs.run_spec import ExecutionSpec, PlanSpec, RewardSpec
from model_specs.variation import DELAYS_VARIABLE, VARIED, Variation, draw_variation

EXECUTION = ExecutionSpec()


def test_all_that_is_declared_is_varied_and_the_trajectory_is_not() -> None:
    varied = draw_variation(7, execution=EXECUTION)
    assert varied.temporary_folder
    assert set(varied.variables) == {
        *("HOSTNAME", "LANG", "TZ", "PYTHONHASHSEED", "OMP_WAIT_POLICY", DELAYS_VARIABLE)
    }
    assert varied.start_delay_s > 0
    changed = varied.of(EXECUTION)
    assert (changed.rollout_engines, changed.threads) == (2, 2)
    assert changed.request_order_seed is not None
    spec = recipe()
    other = spec.model_copy(update={"execution": changed})
    assert trajectory_fingerprint(other) == trajectory_fingerprint(spec)
    assert plan_fingerprint(other) == plan_fingerprint(spec)


def test_another_seed_varies_otherwise_and_the_same_seed_alike() -> None:
    drawn = [draw_variation(seed, execution=EXECUTION) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0].variables["PYTHONHASHSEED"] != drawn[2].variables["PYTHONHASHSEED"]


@pytest.mark.parametrize("left_out", VARIED)
def test_what_is_left_out_is_not_varied_and_all_else_stays_as_it_was_drawn(left_out: str) -> None:
    whole = draw_variation(3, execution=EXECUTION)
    part = draw_variation(3, execution=EXECUTION, what=set(VARIED) - {left_out})
    assert part != whole
    kept = {name: value for name, value in whole.variables.items() if name in part.variables}
    assert part.variables == kept
    for name in ("request_order_seed", "rollout_engines", "threads"):
        assert getattr(part, name) in (None, getattr(whole, name))


def test_nothing_is_varied_by_default_and_an_unknown_name_is_refused() -> None:
    assert draw_variation(3, execution=EXECUTION, what=()) == Variation(seed=3)
    assert Variation(seed=3).of(EXECUTION) == EXECUTION
    assert Variation().describe() == ()
    with pytest.raises(SpecError, match="'weather' is none of temporary_folder, host"):
        draw_variation(3, execution=EXECUTION, what=("weather",))


def test_delays_sleep_where_asked_and_touch_no_other_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random.seed(5)
    before = random.getstate()
    monkeypatch.delenv(DELAYS_VARIABLE, raising=False)
    began = time.perf_counter()
    take_pauses()
    for _ in range(200):
        pause()
    assert take_pauses() == 0
    assert time.perf_counter() - began < 0.1
    monkeypatch.setenv(DELAYS_VARIABLE, "11,20")
    began = time.perf_counter()
    for _ in range(20):
        pause()
    assert (take_pauses(), take_pauses()) == (20, 0)
    assert time.perf_counter() - began > 0.05
    assert random.getstate() == before
    monkeypatch.setenv(DELAYS_VARIABLE, "often")
    with pytest.raises(SpecError, match="'often' is not SEED,MILLISECONDS"):
        pause()


def test_a_reward_is_delayed_and_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        Sample(
            request_id=f"1/p/{index}",
            prompt_id="p",
            sample_index=index,
            prompt_token_ids=(1,),
            token_ids=(2, 3),
            logprobs=(-0.5, -0.5),
            text="12",
            finish_reason="stop",
        )
        for index in range(8)
    ]
    spec = RewardSpec(name="digits")
    monkeypatch.delenv(DELAYS_VARIABLE, raising=False)
    plain = score_samples(samples, {"p": "12"}, spec)
    monkeypatch.setenv(DELAYS_VARIABLE, "1,10")
    began = time.perf_counter()
    assert score_samples(samples, {"p": "12"}, spec) == plain
    assert time.perf_counter() - began > 0.02


@pytest.mark.parametrize(
    ("steps", "every", "keep", "middle"),
    [(8, 4, None, 4), (8, 2, None, 4), (9, 2, 1, 4), (2, 8, None, 1), (3, 100, 1, 1), (8, 3, 1, 3)],
)
def test_a_night_has_a_checkpoint_in_its_middle_that_is_still_there_at_its_end(
    steps: int, every: int, keep: int | None, middle: int
) -> None:
    from engines.checkpoint.retention import kept_steps

    asked = PlanSpec(num_steps=steps, checkpoint_every=every, keep_last=keep)
    plan, found = with_middle_checkpoint(asked)
    assert found == middle
    assert middle in kept_steps(segment_stops(plan, 0), plan)
    assert plan.num_steps == steps


def test_a_night_of_one_step_is_refused() -> None:
    with pytest.raises(SpecError, match=r"plan\.num_steps=1: .*at least 2 steps"):
        with_middle_checkpoint(PlanSpec(num_steps=1, checkpoint_every=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "weather"], "vary: 'weather' is none of"),
        (["--set", "plan.num_steps=1"], "at least 2 steps"),
    ],
)
def test_a_night_that_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str], message: str
) -> None:
    from flows.cli import app

    with pytest.raises(SpecError, match=message):
        app(["nightly", "tiny_cpu", *arguments], exit_on_error=False)
