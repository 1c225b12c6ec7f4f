"""Laws of the canonical encoding, and the committed fingerprints of the shipped recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_specs.base import Execution, Frozen
from model_specs.errors import SpecError
from model_specs.fingerprint import (
    MISSING,
    canonical_bytes,
    flattened,
    plan_fingerprint,
    spec_differences,
    trajectory_fingerprint,
)
from model_specs.overrides import apply_overrides
from model_specs.registry import RECIPES, load_recipe

GOLDENS = Path(__file__).parents[1] / "golden" / "fingerprints.json"

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=12,
)


def _identity(value: object) -> object:
    """Return a key under which two values are equal exactly when they should encode equally."""
    if isinstance(value, tuple):
        return ("tuple", tuple(_identity(item) for item in value))
    if isinstance(value, dict):
        return ("map", tuple(sorted((key, repr(_identity(value[key]))) for key in value)))
    return (type(value).__name__, repr(value))


def test_goldens_of_the_shipped_recipes_have_not_changed() -> None:
    goldens = json.loads(GOLDENS.read_text())
    found = {
        name: {
            "trajectory": trajectory_fingerprint(load_recipe(name)),
            "plan": plan_fingerprint(load_recipe(name)),
        }
        for name in sorted(RECIPES)
    }
    assert found == goldens, (
        "the fingerprint of a shipped recipe changed, so runs made before cannot be compared with "
        "runs made now. If that is meant (a recipe or a spec field changed), write the values "
        f"shown as `found` into {GOLDENS.name} and say so in CHANGELOG.md; if bits change under an "
        "unchanged recipe, raise NUMERICS_VERSION as well. If it is not meant, undo the change."
    )


@given(VALUES, VALUES)
def test_two_values_encode_equally_only_when_they_are_equal(a: object, b: object) -> None:
    assert (canonical_bytes(a) == canonical_bytes(b)) == (_identity(a) == _identity(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        ("", None),
        ((), {}),
        (("ab", "c"), ("a", "bc")),
        (("a", ("b",)), (("a",), "b")),
        ({"a": "b"}, ("a", "b")),
    ],
)
def test_values_that_look_alike_encode_differently(a: object, b: object) -> None:
    assert canonical_bytes(a) != canonical_bytes(b)


def test_the_order_of_mapping_keys_does_not_matter() -> None:
    assert canonical_bytes({"a": 1, "b": 2}) == canonical_bytes({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x", object(), {1: 2}, 1j])
def test_what_cannot_be_encoded_is_refused(value: object) -> None:
    with pytest.raises(SpecError):
        canonical_bytes((value,))


@pytest.mark.parametrize(
    "override",
    [
        "execution.trainer_ranks=2",
        "execution.request_order_seed=7",
        "model.path=generated:elsewhere",
        "reward.timeout_s=5",
        "recipe_digest=abc",
        "data.source=/elsewhere",
        "recipe=other",
    ],
)
def test_execution_fields_never_enter_a_fingerprint(override: str) -> None:
    spec = load_recipe("tiny_cpu")
    changed = apply_overrides(spec, (override,))
    assert changed != spec
    assert trajectory_fingerprint(changed) == trajectory_fingerprint(spec)
    assert plan_fingerprint(changed) == plan_fingerprint(spec)


def test_every_identity_field_changes_its_fingerprint_and_is_named() -> None:
    spec = load_recipe("tiny_cpu")
    changes = {
        "optimizer.lr": "1e-3",
        "optimizer.weight_decay": "0.01",
        "seeds.root": "2",
        "sampling.temperature": "0.6",
        "sampling.stop": '["x"]',
        "data.digest": "abc",
        "data.prompt_ids": '["train-1", "train-2"]',
        "model.rope_theta": "1e6",
        "model.weights_digest": "abc",
        "loss.kl_type": "k1",
        "loss.advantage_transform": "shuffled",
        "reduction.slots": "8",
        "numerics.compute_dtype": "float32",
        "schedule.horizon_samples": "64",
        "reward.digest": "abc",
        "data.rows": "0:9",
        "data.metadata_key": "source",
        "data.chat_template": "{{ messages }}",
        "data.chat_template_args": '{"enable_thinking": false}',
        "data.last_batch": "carry",
        "data.too_long": "refuse",
        "data.duplicates": "refuse",
        "model.qk_norm": "true",
    }
    seen = {trajectory_fingerprint(spec)}
    for field, value in changes.items():
        changed = apply_overrides(spec, (f"{field}={value}",))
        assert [name for name, _, _ in spec_differences(spec, changed)] == [field]
        assert plan_fingerprint(changed) == plan_fingerprint(spec)
        seen.add(trajectory_fingerprint(changed))
    assert len(seen) == len(changes) + 1
    gsm8k = apply_overrides(spec, ("reward=gsm8k",))
    credit = apply_overrides(gsm8k, ("reward.format_credit=0.5",))
    assert [name for name, _, _ in spec_differences(gsm8k, credit)] == ["reward.format_credit"]
    assert trajectory_fingerprint(credit) != trajectory_fingerprint(gsm8k)


def test_the_plan_is_no_part_of_the_trajectory() -> None:
    spec = load_recipe("tiny_cpu")
    longer = apply_overrides(spec, ("plan.num_steps=9",))
    assert trajectory_fingerprint(longer) == trajectory_fingerprint(spec)
    assert plan_fingerprint(longer) != plan_fingerprint(spec)
    assert spec_differences(spec, longer) == ()
    assert spec_differences(spec, longer, part="identity") == (("plan.num_steps", 8, 9),)


def test_differences_name_a_field_that_only_one_spec_has() -> None:
    spec = load_recipe("tiny_cpu")
    stock = apply_overrides(
        spec, ("reduction.kind=stock", "reduction.world_size=2", "execution.trainer_ranks=2")
    )
    assert spec_differences(spec, stock) == (
        ("reduction.kind", "tree", "stock"),
        ("reduction.world_size", MISSING, 2),
    )


def test_flattened_holds_every_identity_leaf_and_no_execution_field() -> None:
    flat = flattened(load_recipe("tiny_cpu"), part="identity")
    assert flat["optimizer.lr"] == 5e-3
    assert flat["plan.gates.preflight"] == "required"
    assert not [name for name in flat if name.startswith("execution") or name.endswith(".path")]
    assert flat.keys() > flattened(load_recipe("tiny_cpu")).keys()


def test_a_nested_execution_marker_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="outermost"):
        type("Bad", (Frozen,), {"__annotations__": {"paths": tuple[Execution[str], ...]}})
