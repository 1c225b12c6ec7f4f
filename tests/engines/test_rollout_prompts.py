"""Prompts: one beginning-of-sequence token, stable ids, and every refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.tiny_model import write_tiny_model
from engines.contracts import PromptSet
from engines.rollout.prompts import build_prompts, gsm8k_label
from model_specs.errors import ArtifactError, SpecError
from model_specs.registry import load_recipe

SPEC = load_recipe("tiny_cpu")
ROWS = [
    {"messages": [{"role": "user", "content": f"{i}+{i}="}], "label": str(2 * i)} for i in range(4)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, SPEC.model)
    return str(folder)


def _build(model_dir: str, folder: Path, rows: list[Any], **data: Any) -> PromptSet:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = SPEC.model_copy(update={"data": SPEC.data.model_copy(update=data)})
    return build_prompts(model_dir, str(path), spec.model_dump_json())


def test_a_prompt_is_the_rendered_template_tokenised_once(model_dir: str, tmp_path: Path) -> None:
    prompts = _build(model_dir, tmp_path, ROWS)
    assert [prompt.prompt_id for prompt in prompts.prompts] == [f"train-{i}" for i in range(4)]
    first = prompts.prompts[1]
    assert first.text == "<|start|>user\n1+1=<|end|>\n<|start|>assistant\n"
    # One start token a message, none in front: the template writes its own.
    assert first.token_ids.count(2) == 2
    assert first.token_ids[0] == 2
    assert first.label == "2"


def test_the_order_of_given_ids_is_kept(model_dir: str, tmp_path: Path) -> None:
    prompts = _build(model_dir, tmp_path, ROWS, prompt_ids=("train-3", "train-0"))
    assert [prompt.prompt_id for prompt in prompts.prompts] == ["train-3", "train-0"]
    assert prompts.digest != _build(model_dir, tmp_path, ROWS).digest


@pytest.mark.parametrize(
    ("ids", "message"),
    [(("train-9",), r"1 unknown \(train-9\)"), (("train-0",) * 2, "1 there twice")],
)
def test_an_unknown_or_doubled_id_is_refused(
    model_dir: str, tmp_path: Path, ids: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        _build(model_dir, tmp_path, ROWS, prompt_ids=ids)


def test_a_label_decides_the_digest(model_dir: str, tmp_path: Path) -> None:
    before = _build(model_dir, tmp_path, ROWS).digest
    assert before == _build(model_dir, tmp_path, ROWS).digest
    assert before != _build(model_dir, tmp_path, [*ROWS[:3], ROWS[3] | {"label": "7"}]).digest


def test_a_longer_prompt_is_dropped_and_counted(model_dir: str, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "1" * 500}], "label": "1"}
    prompts = _build(model_dir, tmp_path, [long, *ROWS])
    assert prompts.num_dropped_too_long == 1
    # An id is the row of the file, also after a dropped one.
    assert prompts.prompts[0].prompt_id == "train-1"
    with pytest.raises(SpecError, match="no prompt is left; 1 are longer"):
        _build(model_dir, tmp_path, [long])


def test_gsm8k_rows_are_mapped_by_the_template(model_dir: str, tmp_path: Path) -> None:
    row = {"question": "How many {x}?", "answer": "so\n#### 1,234 "}
    prompts = _build(
        model_dir,
        tmp_path,
        [row],
        format="gsm8k",
        template="Q: {question} A:",
        system_prompt="Be short.",
    )
    (prompt,) = prompts.prompts
    assert prompt.text.startswith(
        "<|start|>system\nBe short.<|end|>\n<|start|>user\nQ: How many {x}?"
    )
    assert prompt.label == "1234"


def test_a_row_without_its_fields_is_refused(model_dir: str, tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"train-0: data\.format=gsm8k needs question and answer"
    ):
        _build(model_dir, tmp_path, ROWS, format="gsm8k")
    with pytest.raises(ArtifactError, match="no '####'"):
        gsm8k_label("42", where="row")


def test_a_broken_line_is_named(model_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n{not json\n")
    with pytest.raises(ArtifactError, match="line 2: not JSON"):
        build_prompts(model_dir, str(path), SPEC.model_dump_json())
    with pytest.raises(ArtifactError, match="does not exist"):
        build_prompts(model_dir, str(tmp_path / "none.jsonl"), SPEC.model_dump_json())
