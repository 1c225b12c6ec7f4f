"""Dense digits reward, and the laws of `score_samples`."""

from __future__ import annotations

import struct

import pytest

from engines import rewards
from engines.contracts import Sample
from engines.rewards import REWARDS, digits, score_samples
from model_specs.errors import EngineError, SpecError
from model_specs.run_spec import RewardSpec

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


def test_every_declared_reward_is_registered() -> None:
    assert set(REWARDS) == set(RewardSpec.model_fields["name"].annotation.__args__)
    unknown = RewardSpec.model_construct(name="poetry", format_credit=0.0)
    with pytest.raises(SpecError, match="'poetry'; known rewards: digits, gsm8k"):
        score_samples([], {}, unknown)
