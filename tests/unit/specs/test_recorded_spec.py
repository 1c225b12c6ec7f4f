"""Specs compared as JSON find what specs compared as specs do."""

from __future__ import annotations

import pytest

from model_specs.fingerprint import flattened, spec_differences
from model_specs.overrides import apply_overrides
from model_specs.recorded_spec import recorded, recorded_differences, recorded_fields
from model_specs.registry import load_recipe

EVAL = '{"name": "e", "source": "/x.jsonl", "every": 2, "sampling": {"max_new_tokens": 4}}'


@pytest.mark.parametrize(
    ("override", "execution"),
    [
        ("optimizer.lr=0.25", None),
        ("reduction.slots=8", None),
        ('sampling.stop=["x"]', None),
        ("plan.num_steps=9", None),
        (f"plan.evals=[{EVAL}]", "plan.evals.0.source"),
        ("data.source=/elsewhere.jsonl", "data.source"),
        ("model.path=generated:x", "model.path"),
        ("execution.threads=2", "execution.threads"),
        ("trainer_options.gradient_checkpointing=true", "trainer_options.gradient_checkpointing"),
    ],
)
def test_the_same_fields_differ_in_the_same_part(override: str, execution: str | None) -> None:
    spec = load_recipe("tiny_cpu")
    other = apply_overrides(spec, (override,))
    a, b = recorded(spec), recorded(other)
    for part in ("trajectory", "plan"):
        found = recorded_differences(a, b, part=part)
        expected = spec_differences(spec, other, part=part)
        assert [name for name, _, _ in found] == [name for name, _, _ in expected]
        assert recorded_fields(b, part=part).keys() == flattened(other, part=part).keys()
    differing = [name for name, _, _ in recorded_differences(a, b, part="execution")]
    assert [name for name in differing if not name.startswith("plan.evals.0.reward")] == (
        [execution] if execution else []
    )


def test_the_origin_of_a_run_from_nothing_is_no_field() -> None:
    values = recorded(load_recipe("tiny_cpu"))
    assert values["origin"] is None
    assert "origin" not in recorded_fields(values, part="trajectory")
