"""From a data file to rendered, tokenised prompts; runs in an engine's process.

The chat template is rendered to text first and tokenised without special tokens, since a template
writes its own: a second beginning-of-sequence token would be another prompt. Ids are
`<split>-<row>`, so that a prompt keeps its name whatever is filtered.

    prompts = build_prompts(model_dir, "train.jsonl", spec_json)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.contracts import Prompt, PromptSet
from engines.provenance.digest import digest_json
from model_specs.errors import ArtifactError, SpecError
from model_specs.run_spec import DataSpec, RunSpec

ANSWER_MARK = "####"
"""What GSM8K writes before the final answer."""


def build_prompts(model_dir: str, data_file: str, spec: str) -> PromptSet:
    """Render and tokenise all prompts that the spec asks for.

    Args:
        model_dir: Hugging Face folder with tokenizer and chat template.
        data_file: `.jsonl` file, one object a line.
        spec: `RunSpec` as JSON.

    Returns:
        Prompts in file order, or in the order of `data.prompt_ids` where given; longer ones than
        `data.max_prompt_tokens` are dropped and counted.

    Raises:
        ArtifactError: A line is not an object of the declared format, or the file is missing.
        SpecError: A prompt id is unknown or there twice, no prompt is left, or no chat template
            exists.
    """
    from transformers import AutoTokenizer

    data = RunSpec.model_validate_json(spec).data
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if not tokenizer.chat_template:
        raise SpecError(
            f"{model_dir} has no chat template, so messages cannot be rendered; add "
            "chat_template.jinja to the model folder"
        )
    kept: list[Prompt] = []
    dropped = 0
    for prompt_id, row in _selected(read_rows(data_file, data.split), data.prompt_ids):
        messages, label = messages_and_label(row, data, where=f"{data_file}: {prompt_id}")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(token_ids) > data.max_prompt_tokens:
            dropped += 1
            continue
        kept.append(Prompt(prompt_id=prompt_id, token_ids=token_ids, text=text, label=label))
    if not kept:
        raise SpecError(
            f"{data_file}: no prompt is left; {dropped} are longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens}"
        )
    digest = digest_json([[prompt.prompt_id, prompt.token_ids, prompt.label] for prompt in kept])
    return PromptSet(prompts=tuple(kept), num_dropped_too_long=dropped, digest=digest)


def read_rows(data_file: str, split: str) -> dict[str, Mapping[str, Any]]:
    """Return prompt id -> row of a .jsonl file, in file order; blank lines are not rows.

    Raises:
        ArtifactError: The file is missing, or a line is not a JSON object.
    """
    path = Path(data_file)
    if not path.is_file():
        raise ArtifactError(f"data file {data_file} does not exist; set data.source")
    rows: dict[str, Mapping[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArtifactError(f"{data_file}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ArtifactError(
                f"{data_file}, line {number}: not an object but {type(row).__name__}"
            )
        rows[f"{split}-{len(rows)}"] = row
    return rows


def messages_and_label(
    row: Mapping[str, Any], data: DataSpec, *, where: str
) -> tuple[list[Mapping[str, str]], str]:
    """Return chat messages and label of a row in the declared format.

    Raises:
        ArtifactError: A field of the format is missing.
    """
    fields = ("messages", "label") if data.format == "messages" else ("question", "answer")
    missing = [name for name in fields if name not in row]
    if missing:
        raise ArtifactError(
            f"{where}: data.format={data.format} needs {' and '.join(fields)}; the row has "
            f"{', '.join(sorted(row)) or 'nothing'}"
        )
    if data.format == "messages":
        messages, label = list(row["messages"]), str(row["label"])
    else:
        question = data.template.replace("{question}", str(row["question"]))
        messages = [{"role": "user", "content": question}]
        label = gsm8k_label(str(row["answer"]), where=where)
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    return messages, label


def gsm8k_label(answer: str, *, where: str) -> str:
    """Return the text after the last `####`, stripped and without thousands separators.

    Raises:
        ArtifactError: There is no mark.
    """
    _, mark, value = answer.rpartition(ANSWER_MARK)
    if not mark:
        raise ArtifactError(f"{where}: the answer has no {ANSWER_MARK!r} before its final value")
    return value.strip().replace(",", "")


def _selected(
    rows: Mapping[str, Mapping[str, Any]], prompt_ids: Sequence[str]
) -> list[tuple[str, Mapping[str, Any]]]:
    if not prompt_ids:
        return list(rows.items())
    twice = sorted({name for name in prompt_ids if prompt_ids.count(name) > 1})
    unknown = [name for name in prompt_ids if name not in rows]
    if twice or unknown:
        raise SpecError(
            f"data.prompt_ids: {len(unknown)} unknown ({', '.join(unknown[:5]) or 'none'}), "
            f"{len(twice)} there twice ({', '.join(twice[:5]) or 'none'}); the file has "
            f"{len(rows)} rows, "
            f"{next(iter(rows), 'none')} and so on"
        )
    return [(name, rows[name]) for name in prompt_ids]
