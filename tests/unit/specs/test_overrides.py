"""Overrides change exactly the named field, and what is wrong is named."""

from __future__ import annotations

import pytest

from model_specs.errors import SpecError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import StockReduction


def test_values_are_read_as_json_and_else_as_text() -> None:
    spec = apply_overrides(
        load_recipe("tiny_cpu"),
        (
            "optimizer.lr=1e-3",
            "seeds.root=2",
            "trainer=fsdp2",
            "data.shuffle=false",
            'sampling.stop=["\\n", "Q:"]',
            "execution.request_order_seed=5",
        ),
    )
    assert spec.optimizer.lr == 1e-3
    assert spec.seeds.root == 2
    assert spec.data.shuffle is False
    assert spec.sampling.stop == ("\n", "Q:")
    assert spec.execution.request_order_seed == 5


def test_null_is_none_and_text_fields_keep_numbers_as_text() -> None:
    spec = apply_overrides(
        load_recipe("tiny_cpu"), ("model.path=123", "data.system_prompt=true", "data.digest=null")
    )
    assert (spec.model.path, spec.data.system_prompt, spec.data.digest) == ("123", "true", None)


def test_a_value_may_hold_equals_signs() -> None:
    spec = apply_overrides(load_recipe("tiny_cpu"), ("data.template=a=b {question}",))
    assert spec.data.template == "a=b {question}"


def test_the_given_spec_is_left_alone() -> None:
    spec = load_recipe("tiny_cpu")
    assert apply_overrides(spec, ()) == spec
    apply_overrides(spec, ("seeds.root=99",))
    assert spec == load_recipe("tiny_cpu")


def test_fields_that_constrain_each_other_can_change_together() -> None:
    spec = load_recipe("tiny_cpu")
    with pytest.raises(SpecError, match=r"trainer_ranks=8.*slots=4"):
        apply_overrides(spec, ("execution.trainer_ranks=8",))
    both = apply_overrides(spec, ("execution.trainer_ranks=8", "reduction.slots=8"))
    assert both.reduction.slots == 8


def test_the_kind_of_reduction_can_be_changed_and_changed_back() -> None:
    stock = apply_overrides(
        load_recipe("tiny_cpu"), ("reduction.kind=stock", "reduction.world_size=2")
    )
    assert stock.reduction == StockReduction(slots=4, world_size=2)
    assert apply_overrides(stock, ("reduction.kind=tree",)) == load_recipe("tiny_cpu")


def test_an_unknown_key_lists_near_names() -> None:
    with pytest.raises(SpecError, match=r"'optimizer\.lrr'.*optimizer\.lr"):
        apply_overrides(load_recipe("tiny_cpu"), ("optimizer.lrr=1",))
    with pytest.raises(SpecError, match="top-level: schema_version, recipe, model"):
        apply_overrides(load_recipe("tiny_cpu"), ("zzz=1",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.num_steps=many", r"plan\.num_steps='many'"),
        ("optimizer.lr=-1", r"optimizer\.lr=-1.*greater than 0"),
        ("reduction.slots=3", r"reduction=.*power of two, not 3"),
        ("reduction.kind=ring", "'tree', 'stock'"),
        ("trainer=megatronn", r"trainer='megatronn'"),
        ("sampling.top_p=0.9", "log-prob gate cannot hold"),
        ("loss.kl_coef", "not of the form key=value"),
        ("model=5", r"model=5"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        apply_overrides(load_recipe("tiny_cpu"), (override,))
