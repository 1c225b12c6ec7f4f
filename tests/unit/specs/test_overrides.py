"""Overrides change exactly the named field, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
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
        load_recipe("tiny_cpu"), ("recipe=123", "data.system_prompt=true", "data.digest=null")
    )
    assert (spec.recipe, spec.data.system_prompt, spec.data.digest) == ("123", "true", None)


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
        load_recipe("tiny_cpu"),
        ("reduction.kind=stock", "reduction.world_size=2", "execution.trainer_ranks=2"),
    )
    assert stock.reduction == StockReduction(slots=4, world_size=2)
    assert apply_overrides(
        stock, ("reduction.kind=tree", "execution.trainer_ranks=1")
    ) == load_recipe("tiny_cpu")


def test_an_unknown_key_lists_near_names() -> None:
    with pytest.raises(SpecError, match=r"'optimizer\.lrr'.*optimizer\.lr"):
        apply_overrides(load_recipe("tiny_cpu"), ("optimizer.lrr=1",))
    with pytest.raises(SpecError, match="top-level: schema_version, recipe, recipe_digest, model"):
        apply_overrides(load_recipe("tiny_cpu"), ("zzz=1",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.num_steps=many", r"plan\.num_steps='many'"),
        ("optimizer.lr=-1", r"optimizer\.lr=-1.*greater than 0"),
        ("reduction.slots=3", r"reduction: .*power of two, not 3"),
        ("reduction.kind=ring", "'tree', 'stock'"),
        ("trainer=megatronn", r"trainer='megatronn'"),
        ("sampling.top_p=0.9", "log-prob gate cannot hold"),
        ("sampling.min_new_tokens=25", r"min_new_tokens=25 is above sampling\.max_new_tokens=24"),
        ("loss.kl_coef", "not of the form key=value"),
        ("model=5", r"model=5"),
        ("reward=poetry", r"'poetry'; known rewards: digits, gsm8k, math"),
        ("reward.low=2", r"reward\.low=2\.0 is not below"),
        ("data.rows=1:2:3", r"data\.rows='1:2:3'"),
        ("data.source=a.jsonl@[x]", r"data\.rows='x' is not of the form a:b"),
        ("data.prompt_key=q", r"data\.prompt_key='q' is read by data\.format=prompt, but"),
        ("data.chat_template_args=5", r"data\.chat_template_args"),
        ('data.chat_template_args={"tools": []}', "names tools, which Lockstep sets itself"),
        ("data.chat_template=no/such.jinja", "names no file"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        apply_overrides(load_recipe("tiny_cpu"), (override,))


def test_a_slice_is_split_off_the_source_and_is_identity() -> None:
    spec = load_recipe("tiny_cpu")
    sliced = apply_overrides(spec, ("data.source=rows.jsonl@[-8:]",))
    assert (sliced.data.source, sliced.data.rows) == ("rows.jsonl", "-8:")
    assert trajectory_fingerprint(sliced) != trajectory_fingerprint(spec)
    whole = apply_overrides(spec, ("data.source=rows.jsonl",))
    assert trajectory_fingerprint(whole) == trajectory_fingerprint(spec)
    again = apply_overrides(sliced, ("data.source=others.jsonl@[0:2]",))
    assert (again.data.source, again.data.rows) == ("others.jsonl", "0:2")
    assert apply_overrides(sliced, ("data.source=others.jsonl",)).data.rows == "-8:"
    both = ("data.source=rows.jsonl@[0:2]", "data.rows=0:3")
    for overrides in (both, both[::-1]):
        with pytest.raises(SpecError, match=r"names rows 0:2, but data\.rows=0:3") as caught:
            apply_overrides(sliced, overrides)
        assert "prompts_per_step" not in str(caught.value)  # what matters, not the whole group


def test_a_mapping_has_one_spelling() -> None:
    spec = load_recipe("tiny_cpu")
    a = apply_overrides(spec, ('data.chat_template_args={"b": 1, "a": [true]}',))
    b = apply_overrides(spec, ('data.chat_template_args={"a":[true],"b":1}',))
    assert a.data.chat_template_args == '{"a":[true],"b":1}'
    assert trajectory_fingerprint(a) == trajectory_fingerprint(b)
    in_python = type(spec.data)(**{**spec.data.model_dump(), "chat_template_args": {"b": 1}})
    assert in_python.chat_template_args == '{"b":1}'


def test_a_template_file_is_identity_by_its_text(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    (tmp_path / "copy.jinja").write_text("{{ messages }}")
    spec = load_recipe("tiny_cpu")
    read = apply_overrides(spec, (f"data.chat_template={file}",))
    assert read.data.chat_template == "{{ messages }}"
    assert apply_overrides(spec, (f"data.chat_template={tmp_path}/copy.jinja",)) == read
    assert apply_overrides(read, ()) == read


def test_a_relative_source_that_exists_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    spec = apply_overrides(load_recipe("tiny_cpu"), ("data.source=rows.jsonl@[0:1]",))
    assert spec.data.source == str(tmp_path / "rows.jsonl")
