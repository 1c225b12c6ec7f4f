"""Dense digits reward, and the laws of `score_samples`."""

from __future__ import annotations

import struct

import pytest
from pydantic import ValidationError

from engines import rewards
from engines.contracts import Prompt, Sample
from engines.rewards import REWARDS, digits, metadata_of, score_samples
from model_specs.errors import DivergedError, EngineError, SpecError
from model_specs.run_spec import SHIPPED_REWARDS, RewardSpec

DIGITS = RewardSpec(name="digits")


def _sample(text: str, *, prompt_id: str = "train-0", finish_reason: str = "stop") -> Sample:
    return Sample(
        request_id=f"1/{prompt_id}/0",
        prompt_id=prompt_id,
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=(2,),
        logprobs=(-1.0,),
        text=text,
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("", "stop", 0.2),
        ("", "length", 0.0),
        ("12ab", "length", 0.3),
        ("12ab", "stop", 0.5),
        ("77", "stop", 0.8),
        ("89", "stop", 1.0),
        (" 89\n", "stop", 1.0),
        ("89", "length", 0.8),
        ("\u0663", "stop", 0.2),
    ],
)
def test_digits_reward(text: str, finish_reason: str, reward: float) -> None:
    assert digits.score(text, "89", DIGITS, finish_reason=finish_reason) == pytest.approx(reward)


def test_rewards_keep_the_order_of_samples_and_are_exact_float32() -> None:
    samples = [_sample("1a1", prompt_id="train-1"), _sample("5"), _sample("a")]
    found = score_samples(samples, {"train-0": "5", "train-1": "9"}, DIGITS)
    assert found == pytest.approx((0.6, 1.0, 0.2))
    assert found != (0.6, 1.0, 0.2)  # rounded to float32 before use
    assert found == tuple(struct.unpack("<f", struct.pack("<f", value))[0] for value in found)
    assert score_samples(samples[::-1], {"train-0": "5", "train-1": "9"}, DIGITS) == found[::-1]


def test_a_prompt_without_a_label_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="1/train-7/0: prompt 'train-7' has no label"):
        score_samples([_sample("5", prompt_id="train-7")], {"train-0": "5"}, DIGITS)


@pytest.mark.parametrize("value", [float("nan"), -0.5, 1.5])
def test_a_reward_outside_of_its_range_is_refused(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rewards.REWARDS, "digits", lambda *args, **kwargs: value)
    with pytest.raises(EngineError, match="not in"):
        score_samples([_sample("5")], {"train-0": "5"}, DIGITS)


@pytest.mark.parametrize("value", [None, {"score": 1.0}, "1.0"])
def test_a_shipped_reward_that_is_no_number_names_the_sample(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rewards.REWARDS, "digits", lambda *args, **kwargs: value)
    kind = type(value).__name__
    with pytest.raises(EngineError, match=rf"sample 1/train-0/0 returned a {kind} \("):
        score_samples([_sample("5")], {"train-0": "5"}, DIGITS)


def test_a_reward_that_comes_out_differently_again_is_diverged_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def counting(text: str, label: str, **_: object) -> float:
        calls.append(text)
        return 1.0 if calls.count("b") == 2 and text == "b" else 0.0

    monkeypatch.setitem(rewards.REWARDS, "digits", counting)
    samples = [_sample("a"), _sample("b", prompt_id="train-1")]
    with pytest.raises(DivergedError, match=r"1 of 2 .* first sample 1/train-1/0: 0\.0, then 1\.0"):
        score_samples(samples, {"train-0": "", "train-1": ""}, DIGITS)
    assert calls == ["a", "b", "b", "a"]
    error = DivergedError("text", probe="rewards", name="x")
    assert (error.exit_code, error.probe, error.name) == (10, "rewards", "x")


def test_the_range_of_a_reward_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewards.REWARDS, "digits", lambda *args, **kwargs: -1.0)
    signed = RewardSpec(name="digits", low=-1.0)
    assert score_samples([_sample("5")], {"train-0": "5"}, signed) == (-1.0,)
    with pytest.raises(EngineError, match=r"-1\.0, not in \[0\.0, 1\.0\]; set reward\.low"):
        score_samples([_sample("5")], {"train-0": "5"}, DIGITS)


def test_metadata_reaches_the_reward_as_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def keeping(text: str, label: str, *, metadata: object, **_: object) -> float:
        seen.append(metadata)
        return 0.0

    monkeypatch.setitem(rewards.REWARDS, "digits", keeping)
    prompts = [
        Prompt(prompt_id="train-0", token_ids=(1,), text="", label="", metadata='{"level":3}'),
        Prompt(prompt_id="train-1", token_ids=(2,), text="", label=""),
    ]
    samples = [_sample("a"), _sample("b", prompt_id="train-1")]
    labels = {prompt.prompt_id: prompt.label for prompt in prompts}
    score_samples(samples, labels, DIGITS, metadata=metadata_of(prompts))
    assert seen == [{"level": 3}, None, None, {"level": 3}]


def test_every_declared_reward_is_registered() -> None:
    assert tuple(sorted(REWARDS)) == SHIPPED_REWARDS
    with pytest.raises(ValidationError, match="'poetry'; known rewards: digits, gsm8k, math"):
        RewardSpec(name="poetry")


def test_a_declared_reward_that_is_not_registered_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(rewards.REWARDS, "digits")
    with pytest.raises(SpecError, match="'digits'; known rewards: gsm8k, math"):
        score_samples([], {}, DIGITS)
