"""The order of prompts is a pure function of the seed, and data files are read strictly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from engines.data import arithmetic_rows, data_file, load_rows, prompt_order, write_rows
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
    with pytest.raises(SpecError, match=r"3 usable prompts but data\.prompts_per_step=4"):
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
    with pytest.raises(ArtifactError, match="does not exist"):
        data_file(tmp_path / "nowhere", split="train")
