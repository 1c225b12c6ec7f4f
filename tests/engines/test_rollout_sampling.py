"""Sampling parameters, end-of-sequence ids, and what is refused in vLLM's answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.contracts import SampleRequest, TrainSample
from engines.rollout.plugin import check_version, hook
from engines.rollout.sampling import (
    check_stopped,
    chosen_logprobs,
    end_of_sequence_ids,
    to_sample,
)
from model_specs.errors import EngineError, UnsupportedError

REQUEST = SampleRequest(
    request_id="1/train-0/0", prompt_id="train-0", sample_index=0, prompt_token_ids=(5, 6), seed=9
)


def _row(token_id: int, logprob: float) -> dict[int, Any]:
    return {token_id: SimpleNamespace(logprob=logprob)}


def _answer(**changes: Any) -> Any:
    completion = {
        "token_ids": [8, 3],
        "logprobs": [_row(8, -1.0), _row(3, -2.0)],
        "finish_reason": "stop",
        "stop_reason": None,
        "text": "x",
    }
    return SimpleNamespace(
        prompt_token_ids=[5, 6], outputs=[SimpleNamespace(**completion | changes)]
    )


def test_all_end_of_sequence_ids_are_found(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_of_sequence_ids(str(tmp_path), SimpleNamespace(eos_token_id=3)) == (2, 3, 5, 7)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert end_of_sequence_ids(str(tmp_path), SimpleNamespace(eos_token_id=None)) == ()


def test_the_sampled_end_of_sequence_token_is_kept_and_scored() -> None:
    sample = to_sample(REQUEST, _answer(), stop_token_ids=(3,))
    assert sample.token_ids == (8, 3)
    assert sample.logprobs == (-1.0, -2.0)
    assert sample.stop_token == 3


def test_what_was_forbidden_and_until_when_goes_with_the_sample() -> None:
    free = to_sample(REQUEST, _answer(), stop_token_ids=(3, 5))
    assert (free.forbidden_ids, free.forbidden_until) == ((), 0)
    scored = TrainSample.of(
        to_sample(REQUEST, _answer(), stop_token_ids=(3, 5), min_new_tokens=1), masked=True
    )
    assert (scored.forbidden_ids, scored.forbidden_until) == ((3, 5), 1)
    assert (scored.token_ids, scored.masked, scored.rollout_logprobs) == ((8, 3), True, ())


def test_a_nan_is_kept_for_the_gate() -> None:
    (value,) = chosen_logprobs("r", (8,), [_row(8, math.nan)])
    assert math.isnan(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [_row(8, -1.0)]}, "2 token ids but 1 log-probs"),
        ({"logprobs": None}, "no log-probs for 2 tokens"),
        ({"logprobs": [_row(8, -1.0), _row(4, -2.0)]}, "token 3 at position 1 has no log-prob"),
        ({"finish_reason": "abort"}, "ended by 'abort'"),
        ({"finish_reason": "length"}, "did not end the completion"),
        ({"token_ids": [3, 8], "logprobs": [_row(3, 0.0), _row(8, 0.0)]}, "token 3 at position 0"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        to_sample(REQUEST, _answer(**changes), stop_token_ids=(3,))


def test_an_answer_for_another_prompt_is_refused() -> None:
    answer = _answer()
    answer.prompt_token_ids = [5, 7]
    with pytest.raises(EngineError, match="another prompt"):
        to_sample(REQUEST, answer, stop_token_ids=(3,))


def test_a_stop_string_may_end_a_completion_before_an_end_of_sequence_token() -> None:
    check_stopped("r", (8, 9), "stop", stop_token_ids=(3,))
    check_stopped("r", (8, 9), "length", stop_token_ids=(3,))


def test_an_untested_vllm_is_refused() -> None:
    check_version("0.32.0+cpu")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.33\.0 was never tested.*0\.32\.0"):
        check_version("0.33.0")


def test_a_missing_hook_is_an_error_that_names_it() -> None:
    assert hook(math, "pi") == math.pi
    with pytest.raises(UnsupportedError, match=r"no math\.dispatch"):
        hook(math, "dispatch")
