"""A value that no run could use is refused where it is set, and not hours later."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.train.registry import check_supported
from flows.train import resumable
from model_specs.errors import SpecError, UnsupportedError
from model_specs.field_schema import overrides_schema
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

SPEC = load_recipe("tiny_cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward.timeout_s=Infinity",), r"reward\.timeout_s=inf.*finite"),
        (("optimizer.lr=NaN",), r"optimizer\.lr=nan.*finite"),
        (("sampling.temperature=0.001",), r"temperature=0\.001: vLLM draws at 0\.01"),
        (('sampling.stop=["", "x"]',), "empty text"),
        (("sampling.max_new_tokens=256",), r"max_new_tokens=256 leaves no room.*256 positions"),
        (("schedule.kind=cosine",), r"horizon_samples=0, which is not after warmup_samples=0"),
        (
            ("schedule.kind=wsd", "schedule.warmup_samples=32", "schedule.horizon_samples=32"),
            r"horizon_samples=32, which is not after warmup_samples=32",
        ),
        (("schedule.min_lr=1",), r"min_lr=1\.0 is above optimizer\.lr=0\.005"),
        (("model.num_key_value_heads=3",), "num_key_value_heads=3 does not divide"),
        (("model.head_dim=15",), "head_dim=15 is odd"),
        (("reduction.kind=stock", "reduction.world_size=2"), "world_size=2 decides the bits"),
        (("trainer_options.max_tokens_per_rank=63",), "greater than or equal to 64"),
        (("reward.format_credit=0.5",), "read by the reward gsm8k alone, not by digits"),
        (('reward.options={"a": 1}',), "read by own code alone, not digits"),
        (
            (
                'plan.evals=[{"name": "e", "every": 1, "sampling": {"max_new_tokens": 4, '
                '"oversample": 2}}]',
            ),
            "oversample=2 is for training",
        ),
    ],
)
def test_what_no_run_could_use_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        apply_overrides(SPEC, overrides)


def test_a_run_of_another_numerics_version_is_read_but_not_gone_on_with() -> None:
    old = apply_overrides(SPEC, ("numerics.version=0",))
    assert RunSpec.model_validate_json(old.model_dump_json()) == old
    with pytest.raises(UnsupportedError, match=r"numerics\.version=0: this code computes version"):
        check_supported(resumable(old, ("plan.num_steps=9",)))
    check_supported(SPEC)


def test_a_reward_that_is_named_again_by_its_place_keeps_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "def score(completion_text, label, spec, *, finish_reason, metadata):\n    return 0\n"
    )
    options = ("reward.low=-1", 'reward.options={"a": 1}')
    named = apply_overrides(SPEC, (f"reward={file}:score", *options))
    assert apply_overrides(named, (f"reward={file}:score",)) == named
    credited = apply_overrides(SPEC, ("reward=gsm8k", "reward.format_credit=0.5"))
    assert apply_overrides(credited, ("reward=math",)).reward.format_credit == 0.0


def test_the_models_fields_are_in_the_schema_of_overrides() -> None:
    known = overrides_schema()["properties"]
    assert {"model.path", "model.rope_theta", "model.moe.num_experts", "optimizer.lr"} <= set(known)
