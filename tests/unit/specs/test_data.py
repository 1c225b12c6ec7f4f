"""The order of prompts is a pure function of the seed, and data files are read strictly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from engines.contracts import Prompt
from engines.data import (
    arithmetic_rows,
    data_file,
    load_rows,
    prompt_order,
    selected_rows,
    write_rows,
)
from engines.loop import sample_requests
from model_specs.errors import ArtifactError, SpecError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe

SPEC = load_recipe("tiny_cpu")


def test_an_epoch_shows_each_prompt_once_and_drops_the_remainder() -> None:
    seen = [index for step in range(1, 6) for index in prompt_order(22, SPEC, step)]
    assert len(seen) == 20
    assert len(set(seen)) == 20
    assert set(seen) < set(range(22))


def test_no_prompt_is_twice_in_a_step_across_epochs() -> None:
    for step in range(1, 40):
        assert len(set(prompt_order(7, SPEC, step))) == 4


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    first = [prompt_order(256, SPEC, step) for step in range(1, 65)]
    second = [prompt_order(256, SPEC, step) for step in range(65, 129)]
    other = apply_overrides(SPEC, ("seeds.root=2",))
    assert first != second
    assert sorted(sum(first, ())) == sorted(sum(second, ())) == list(range(256))
    assert prompt_order(256, other, 1) != first[0]


def test_the_order_is_fixed_for_all_time() -> None:
    assert prompt_order(256, SPEC, 1) == (148, 177, 39, 58)
    assert prompt_order(256, SPEC, 65) == (36, 185, 195, 239)


def test_without_shuffle_the_order_is_the_files() -> None:
    spec = apply_overrides(SPEC, ("data.shuffle=false",))
    assert prompt_order(9, spec, 1) == (0, 1, 2, 3)
    assert prompt_order(9, spec, 2) == (4, 5, 6, 7)
    assert prompt_order(9, spec, 3) == (0, 1, 2, 3)


def test_fewer_prompts_than_a_step_needs_are_refused() -> None:
    assert sorted(prompt_order(4, SPEC, 1)) == [0, 1, 2, 3]
    with pytest.raises(SpecError, match=r"3 usable prompts but a step draws 4"):
        prompt_order(3, SPEC, 1)
    with pytest.raises(SpecError, match="counted from 1"):
        prompt_order(4, SPEC, 0)


def test_arithmetic_rows_are_right_and_the_same_everywhere(tmp_path: Path) -> None:
    rows = arithmetic_rows("train")
    for row in rows:
        (message,) = row["messages"]
        left, sign, right = message["content"].removeprefix("What is ").rstrip("?").split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert (message["role"], row["label"]) == ("user", str(value))
    write_rows(tmp_path / "train.jsonl", rows)
    loaded, digest = load_rows(tmp_path / "train.jsonl")
    assert loaded == rows
    assert digest == "fe33f453bf1636b3c0f64fbdf61414c028b1a9664c8533eb17971259f520b02d"
    assert arithmetic_rows("train", seed=1) != rows
    with pytest.raises(SpecError, match="'dev'; it has test, train"):
        arithmetic_rows("dev")


def test_rows_keep_line_separators_inside_strings(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    content = json.dumps({"question": "a\u2028b"}, ensure_ascii=False) + "\n\n"
    file.write_text(content, encoding="utf-8")
    rows, digest = load_rows(file)
    assert rows == ({"question": "a\u2028b"},)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}\n[1]\n", "line 2: a list"), ('{"a"\n', "line 1: not JSON"), ("\n", "has no rows")],
)
def test_a_malformed_data_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(ArtifactError, match=message):
        load_rows(data_file(tmp_path, split="train"))


def test_a_missing_split_names_what_the_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("{}\n")
    with pytest.raises(ArtifactError, match=r"no train\.jsonl; it holds test\.jsonl"):
        data_file(tmp_path, split="train")
    (tmp_path / "test.parquet").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"both test\.jsonl and test\.parquet"):
        data_file(tmp_path, split="test")
    (tmp_path / "rows.csv").write_text("")
    with pytest.raises(ArtifactError, match=r"rows\.csv is neither \.jsonl nor \.parquet"):
        data_file(tmp_path / "rows.csv", split="test")
    with pytest.raises(ArtifactError, match="does not exist"):
        data_file(tmp_path / "nowhere", split="train")


@pytest.mark.parametrize("shuffle", ["true", "false"])
@pytest.mark.parametrize("num_prompts", [4, 5, 7, 8, 11, 22])
def test_carried_over_each_epoch_still_shows_each_prompt_once(
    num_prompts: int, shuffle: str
) -> None:
    spec = apply_overrides(SPEC, ("data.last_batch=carry", f"data.shuffle={shuffle}"))
    steps = [prompt_order(num_prompts, spec, step) for step in range(1, 3 * num_prompts + 1)]
    assert all(len(set(step)) == 4 for step in steps)
    shown = sum(steps, ())
    for epoch in range(len(shown) // num_prompts):
        part = shown[epoch * num_prompts : (epoch + 1) * num_prompts]
        assert sorted(part) == list(range(num_prompts))


def test_without_a_remainder_carrying_changes_nothing() -> None:
    spec = apply_overrides(SPEC, ("data.last_batch=carry",))
    for step in (1, 63, 64, 65, 200):
        assert prompt_order(256, spec, step) == prompt_order(256, SPEC, step)
    assert prompt_order(7, spec, 2) != prompt_order(7, SPEC, 2)


def test_the_order_depends_on_the_step_alone_also_across_an_epoch() -> None:
    spec = apply_overrides(SPEC, ("data.last_batch=carry",))
    forwards = [prompt_order(9, spec, step) for step in range(1, 12)]
    assert [prompt_order(9, spec, step) for step in range(11, 0, -1)] == forwards[::-1]


def test_the_same_prompt_draws_other_tokens_in_the_next_epoch() -> None:
    prompts = [Prompt(prompt_id=f"train-{i}", token_ids=(i,), text="", label="") for i in range(4)]
    first, second = (
        {request.prompt_id: request.seed for request in sample_requests(prompts, SPEC, step)}
        for step in (1, 2)
    )
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_parquet_and_json_lines_hold_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = arithmetic_rows("test")
    write_rows(tmp_path / "test.jsonl", rows)
    (tmp_path / "p").mkdir()
    file = tmp_path / "p" / "test.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    found, digest = load_rows(data_file(tmp_path / "p", split="test"))
    assert found == load_rows(tmp_path / "test.jsonl")[0] == rows
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match="no readable parquet file"):
        load_rows(file)


@pytest.mark.parametrize(
    ("bounds", "chosen"),
    [
        (None, range(10)),
        (":", range(10)),
        ("2:5", range(2, 5)),
        ("-3:", range(7, 10)),
        (":-8", range(2)),
        ("8:99", range(8, 10)),
    ],
)
def test_rows_are_selected_as_python_does(bounds: str | None, chosen: range) -> None:
    assert selected_rows(10, bounds) == chosen


def test_rows_that_leave_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match=r"data\.rows='5:5' leaves none of the 10 rows"):
        selected_rows(10, "5:5")
