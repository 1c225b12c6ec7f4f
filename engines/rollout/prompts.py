"""From a data file to rendered, tokenised prompts; runs in an engine's process.

The chat template is rendered to text first and tokenised without special tokens, since a template
writes its own: a second beginning-of-sequence token would be another prompt. A template may not
read the clock, because tomorrow's prompts would be others. Ids are `<split>-<row>`, with the row of
the whole file, so that a prompt keeps its name whatever is selected or dropped.

    prompts = build_prompts(model_dir, "train.jsonl", spec_json)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from engines.contracts import Prompt, PromptSet
from engines.data import load_rows, selected_rows
from engines.provenance.digest import digest_json
from model_specs.errors import ArtifactError, SpecError
from model_specs.json_text import canonical_json, parsed
from model_specs.run_spec import DataSpec, RunSpec

ANSWER_MARK = "####"
"""What GSM8K writes before the final answer."""


def build_prompts(model_dir: str, data_file: str, spec: str) -> PromptSet:
    """Render and tokenise all prompts that the spec asks for.

    Args:
        model_dir: Hugging Face folder with tokenizer and chat template.
        data_file: `.jsonl` or `.parquet` file.
        spec: `RunSpec` as JSON.

    Returns:
        Prompts in file order, or in the order of `data.prompt_ids` where given. Longer ones than
        `data.max_prompt_tokens` are dropped and counted, or refused, by `data.too_long`.

    Raises:
        ArtifactError: A row is not of the declared format, or the file is missing or unreadable.
        SpecError: A prompt id is unknown or there twice, two rows are the same prompt, no prompt is
            left, one is too long under `data.too_long=refuse`, there is no chat template, or it
            cannot be rendered, reads the clock, or writes two beginning-of-sequence tokens.
    """
    from transformers import AutoTokenizer

    data = RunSpec.model_validate_json(spec).data
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if not (data.chat_template or tokenizer.chat_template):
        raise SpecError(
            f"{model_dir} has no chat template, so messages cannot be rendered; set "
            "data.chat_template to a Jinja text or file"
        )
    kept: list[Prompt] = []
    dropped = 0
    for prompt_id, row in _selected(_named_rows(data_file, data), data.prompt_ids):
        prompt = _prompt(tokenizer, prompt_id, row, data, where=f"{data_file}: {prompt_id}")
        if len(prompt.token_ids) <= data.max_prompt_tokens:
            kept.append(prompt)
            continue
        dropped += 1
        if data.too_long == "refuse":
            raise SpecError(
                f"{data_file}: {prompt_id} has {len(prompt.token_ids)} tokens, more than "
                f"data.max_prompt_tokens={data.max_prompt_tokens}; raise it, or set "
                "data.too_long=drop to leave such prompts out"
            )
    if not kept:
        raise SpecError(
            f"{data_file}: no prompt is left; {dropped} are longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens}"
        )
    if data.duplicates == "refuse":
        _refuse_duplicates(kept, data_file)
    digest = digest_json(
        [[prompt.prompt_id, prompt.token_ids, prompt.label, prompt.metadata] for prompt in kept]
    )
    return PromptSet(prompts=tuple(kept), num_dropped_too_long=dropped, digest=digest)


def _prompt(
    tokenizer: Any, prompt_id: str, row: Mapping[str, Any], data: DataSpec, *, where: str
) -> Prompt:
    messages, label = messages_and_label(row, data, where=where)
    text = render(tokenizer, messages, data, where=where)
    token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not token_ids:
        raise SpecError(
            f"{where}: the rendered prompt {text!r} has no token, and nothing can follow it; leave "
            "the row out by data.rows, or correct data.chat_template"
        )
    start = tokenizer.bos_token_id
    if start is not None and token_ids[:2] == (start, start):
        raise SpecError(
            f"{where}: the chat template writes the beginning-of-sequence token {start} twice; "
            "correct it by data.chat_template"
        )
    return Prompt(
        prompt_id=prompt_id,
        token_ids=token_ids,
        text=text,
        label=label,
        metadata=_metadata(row, data, where=where),
    )


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], data: DataSpec, *, where: str
) -> str:
    """Return the text of a prompt: the messages in the chat template, then its generation prompt.

    Raises:
        SpecError: The template raised, or asked for the time.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            chat_template=data.chat_template,
            strftime_now=_refuse_clock,
            **parsed(data.chat_template_args),
        )
    except SpecError:
        raise
    except Exception as error:  # a template raises what it likes, through Jinja's own classes
        raise SpecError(
            f"{where}: the chat template raised {type(error).__name__}: {error}; see data.format, "
            "data.chat_template and data.chat_template_args"
        ) from error
    assert isinstance(text, str)
    return text


def _refuse_clock(*_: object) -> NoReturn:
    raise SpecError(
        "the chat template asks for today's date, so that tomorrow's prompts would be others; give "
        'it a fixed one, for most templates by data.chat_template_args={"date_string": '
        '"26 Jul 2024"}'
    )


def messages_and_label(
    row: Mapping[str, Any], data: DataSpec, *, where: str
) -> tuple[list[Mapping[str, str]], str]:
    """Return chat messages and label of a row in the declared format.

    Raises:
        ArtifactError: A key of the format is missing, or its value is of another kind.
    """
    keys = row_keys(data)
    missing = [f"{key!r} ({setting})" for setting, key in keys.items() if row.get(key) is None]
    if missing:
        raise ArtifactError(
            f"{where}: data.format={data.format} needs {' and '.join(missing)}; the row has "
            f"{', '.join(sorted(row)) or 'nothing'}"
        )
    first, second = (row[key] for key in keys.values())
    if data.format == "messages":
        messages = _messages(first, where=where)
    else:
        text = data.template.replace("{question}", _text(first, "prompt", where=where))
        messages = [{"role": "user", "content": text}]
    label = _text(second, "label", where=where)
    if data.format == "gsm8k":
        label = gsm8k_label(label, where=where)
    if data.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ArtifactError(
                f"{where}: the row has a system message and data.system_prompt is set too; drop one"
            )
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    return messages, label


def row_keys(data: DataSpec) -> dict[str, str]:
    """Return what decides a key -> the row's key, of the prompt and then of the label."""
    label = {"data.label_key": data.label_key or "label"}
    if data.format == "messages":
        return {"data.messages_key": data.messages_key or "messages"} | label
    if data.format == "prompt":
        return {"data.prompt_key": data.prompt_key or "prompt"} | label
    return {"the question": "question", "the answer": "answer"}


def _messages(value: Any, *, where: str) -> list[Mapping[str, str]]:
    if isinstance(value, str):
        raise ArtifactError(
            f"{where}: the messages are one text; read it by data.format=prompt and data.prompt_key"
        )
    if not isinstance(value, list | tuple) or not value:
        raise ArtifactError(f"{where}: the messages are {value!r}, not a list of messages")
    messages: list[Mapping[str, str]] = []
    for number, message in enumerate(value):
        fields = dict(message) if isinstance(message, Mapping) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise ArtifactError(
                f"{where}: message {number} is {message!r}; it needs a text `role` and a text "
                "`content`"
            )
        # Parquet gives every message the columns of all of them, as null.
        messages.append({key: item for key, item in fields.items() if item is not None})
    return messages


def _text(value: Any, what: str, *, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArtifactError(
            f"{where}: the {what} is a {type(value).__name__} ({value!r}), not text or a number"
        )
    return str(value)


def _metadata(row: Mapping[str, Any], data: DataSpec, *, where: str) -> str | None:
    if data.metadata_key is None:
        return None
    if data.metadata_key not in row:
        raise ArtifactError(
            f"{where}: the row has no {data.metadata_key!r} (data.metadata_key); it has "
            f"{', '.join(sorted(row)) or 'nothing'}"
        )
    try:
        return canonical_json(row[data.metadata_key])
    except ValueError as error:
        raise ArtifactError(f"{where}: {data.metadata_key}: {error}") from error


def gsm8k_label(answer: str, *, where: str) -> str:
    """Return the text after the last `####`, stripped and without thousands separators.

    Raises:
        ArtifactError: There is no mark.
    """
    _, mark, value = answer.rpartition(ANSWER_MARK)
    if not mark:
        raise ArtifactError(f"{where}: the answer has no {ANSWER_MARK!r} before its final value")
    return value.strip().replace(",", "")


def _named_rows(data_file: str, data: DataSpec) -> dict[str, Mapping[str, Any]]:
    rows, _ = load_rows(data_file)
    return {f"{data.split}-{index}": rows[index] for index in selected_rows(len(rows), data.rows)}


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
            f"{len(twice)} there twice ({', '.join(twice[:5]) or 'none'}); there are {len(rows)} "
            f"rows, {next(iter(rows), 'none')} and so on"
        )
    return [(name, rows[name]) for name in prompt_ids]


def _refuse_duplicates(prompts: Sequence[Prompt], data_file: str) -> None:
    first: dict[tuple[int, ...], str] = {}
    twice: list[tuple[str, str]] = []
    for prompt in prompts:
        earlier = first.setdefault(prompt.token_ids, prompt.prompt_id)
        if earlier != prompt.prompt_id:
            twice.append((prompt.prompt_id, earlier))
    if twice:
        shown = ", ".join(f"{later} is {earlier}" for later, earlier in twice[:3])
        raise SpecError(
            f"{data_file}: {len(twice)} of {len(prompts)} prompts are there already ({shown}); "
            "remove them, or set data.duplicates=keep to count such a prompt twice"
        )
