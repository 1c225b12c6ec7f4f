"""Prompts: one beginning-of-sequence token, stable ids, and every refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.tiny_model import CHAT_TEMPLATE, write_tiny_model
from engines.contracts import PromptSet
from engines.rollout.prompts import build_prompts, gsm8k_label
from model_specs.errors import ArtifactError, SpecError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe

SPEC = load_recipe("tiny_cpu")
START = 2
"""Id of the token that starts a message, in the generated tokenizer."""
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
        ArtifactError,
        match=r"train-0: data\.format=gsm8k needs 'question' \(the question\) and 'answer'",
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


def test_a_tokenizer_that_adds_a_start_token_adds_no_second_one(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = _model_that_adds_a_start_token(tmp_path / "model")
    (prompt,) = _build(str(folder), tmp_path, ROWS[:1]).prompts
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.bos_token_id == START
    assert tokenizer(prompt.text)["input_ids"][:2] == [START, START]  # what must not happen
    assert prompt.token_ids[0] == START
    assert prompt.token_ids[1] != START
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_a_template_that_writes_two_start_tokens_is_refused(tmp_path: Path) -> None:
    folder = _model_that_adds_a_start_token(tmp_path / "model")
    twice = "<|start|>" + CHAT_TEMPLATE
    with pytest.raises(SpecError, match="writes the beginning-of-sequence token 2 twice"):
        _build(str(folder), tmp_path, ROWS, chat_template=twice)


def _model_that_adds_a_start_token(folder: Path) -> Path:
    """A llama-style tokenizer: its post-processor puts `<|start|>` in front of any text."""
    llama = SPEC.model.model_copy(update={"family": "llama", "qkv_bias": False})
    write_tiny_model(folder, llama)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {
            "<|start|>": {"id": "<|start|>", "ids": [START], "tokens": ["<|start|>"]}
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|start|>"}))
    return folder


def test_an_own_template_and_its_arguments_are_used(model_dir: str, tmp_path: Path) -> None:
    template = "{{ mood }}:{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    spec = apply_overrides(
        SPEC, (f"data.chat_template={template}", 'data.chat_template_args={"mood": "glad"}')
    )
    fields = {"chat_template", "chat_template_args"}
    changes = {name: getattr(spec.data, name) for name in fields}
    (prompt,) = _build(model_dir, tmp_path, ROWS[:1], **changes).prompts
    assert prompt.text == "glad:0+0=>"
    with pytest.raises(SpecError, match="the chat template raised UndefinedError"):
        _build(model_dir, tmp_path, ROWS, chat_template="{{ a.b.c }}")


def test_a_template_that_reads_the_clock_is_refused(model_dir: str, tmp_path: Path) -> None:
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}"
        "{% endif %}{{ date_string }}:{{ messages[0]['content'] }}"
    )
    with pytest.raises(SpecError, match="asks for today's date"):
        _build(model_dir, tmp_path, ROWS, chat_template=template)
    fixed = _build(
        model_dir,
        tmp_path,
        ROWS,
        chat_template=template,
        chat_template_args='{"date_string":"26 Jul 2024"}',
    )
    assert fixed.prompts[0].text == "26 Jul 2024:0+0="


def test_a_model_without_a_template_needs_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(folder, SPEC.model)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"no chat template.*set data\.chat_template"):
        _build(str(folder), tmp_path, ROWS)
    own = _build(str(folder), tmp_path, ROWS, chat_template="{{ messages[0]['content'] }}")
    assert own.prompts[0].text == "0+0="


def test_keys_are_mapped_for_text_and_for_messages(model_dir: str, tmp_path: Path) -> None:
    rows = [{"problem": "1+1", "solution": 2, "extra": {"b": 1, "a": [2.5]}}]
    prompts = _build(
        model_dir,
        tmp_path,
        rows,
        format="prompt",
        prompt_key="problem",
        label_key="solution",
        metadata_key="extra",
        template="Solve {question}.",
    ).prompts
    assert prompts[0].text == "<|start|>user\nSolve 1+1.<|end|>\n<|start|>assistant\n"
    assert (prompts[0].label, prompts[0].metadata) == ("2", '{"a":[2.5],"b":1}')
    chat = [{"chat": ROWS[1]["messages"], "gold": "2"}]
    mapped = _build(model_dir, tmp_path, chat, messages_key="chat", label_key="gold")
    assert mapped.prompts[0].token_ids == _build(model_dir, tmp_path, ROWS).prompts[1].token_ids
    assert mapped.prompts[0].metadata is None


def test_parquet_rows_give_the_prompts_of_json_lines(model_dir: str, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    expected = _build(model_dir, tmp_path, ROWS)
    # A column that only one message has is null in all others.
    named = [ROWS[0] | {"messages": [ROWS[0]["messages"][0] | {"name": "Ann"}]}, *ROWS[1:]]
    parquet.write_table(pyarrow.Table.from_pylist(named), tmp_path / "train.parquet")
    found = build_prompts(model_dir, str(tmp_path / "train.parquet"), SPEC.model_dump_json())
    assert found == expected


def test_a_slice_keeps_the_names_of_its_rows(model_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def build(*overrides: str) -> PromptSet:
        spec = apply_overrides(SPEC, overrides)
        return build_prompts(model_dir, str(path), spec.model_dump_json())

    prompts = build(f"data.source={path}@[-3:-1]").prompts
    assert [prompt.prompt_id for prompt in prompts] == ["train-1", "train-2"]
    with pytest.raises(SpecError, match="leaves none of the 4 rows"):
        build("data.rows=4:")
    with pytest.raises(SpecError, match=r"1 unknown \(train-3\)"):
        build("data.rows=:2", 'data.prompt_ids=["train-3"]')


def test_a_longer_prompt_can_be_refused_instead(model_dir: str, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "1" * 500}], "label": "1"}
    with pytest.raises(SpecError, match=r"train-4 has 519 tokens, more than .*=96; raise it"):
        _build(model_dir, tmp_path, [*ROWS, long], too_long="refuse")


def test_the_same_prompt_twice_is_refused_unless_it_is_meant(
    model_dir: str, tmp_path: Path
) -> None:
    rows = [*ROWS, ROWS[1] | {"label": "7"}]
    with pytest.raises(SpecError, match=r"1 of 5 prompts .*\(train-4 is train-1\)"):
        _build(model_dir, tmp_path, rows, duplicates="refuse")
    assert len(_build(model_dir, tmp_path, rows, duplicates="keep").prompts) == 5


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"messages": "1+1", "label": "2"}, {}, r"one text; read it by data\.format=prompt"),
        ({"messages": [], "label": "2"}, {}, "not a list of messages"),
        ({"messages": [{"role": "user"}], "label": "2"}, {}, "message 0 is .* a text `content`"),
        ({"messages": [], "label": None}, {}, r"needs 'label' \(data\.label_key\)"),
        ({"prompt": ["a"], "label": "2"}, {"format": "prompt"}, "the prompt is a list"),
        ({"prompt": "a", "label": True}, {"format": "prompt"}, r"the label is a bool \(True\)"),
        (ROWS[0], {"metadata_key": "source"}, r"no 'source' \(data\.metadata_key\)"),
        (
            {"messages": [{"role": "system", "content": "x"}], "label": "2"},
            {"system_prompt": "y"},
            "has a system message and data.system_prompt is set too",
        ),
    ],
)
def test_a_row_of_another_kind_is_refused_by_name(
    row: dict[str, Any], changes: dict[str, Any], message: str, model_dir: str, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=f"train-0: .*{message}"):
        _build(model_dir, tmp_path, [row], **changes)


def test_metadata_decides_the_digest(model_dir: str, tmp_path: Path) -> None:
    rows = [row | {"level": 1} for row in ROWS]
    one = _build(model_dir, tmp_path, rows, metadata_key="level").digest
    rows[2]["level"] = 2
    assert one != _build(model_dir, tmp_path, rows, metadata_key="level").digest


def test_a_prompt_without_a_token_is_refused_by_its_row(model_dir: str, tmp_path: Path) -> None:
    rows = [*ROWS[:1], {"messages": [{"role": "user", "content": ""}], "label": "1"}]
    with pytest.raises(SpecError, match=r"train\.jsonl.*rendered prompt '' has no token"):
        _build(model_dir, tmp_path, rows, chat_template="{{ messages[0]['content'] }}")
