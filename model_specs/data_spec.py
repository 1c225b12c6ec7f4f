"""`DataSpec`: which prompts and labels, how a row is read, and how a prompt is rendered.

DataSpec(source="generated:arithmetic", prompts_per_step=4, max_prompt_tokens=96)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from model_specs.base import Execution, Frozen
from model_specs.json_text import JsonObject, parsed

DATA_SUFFIXES: Final = (".jsonl", ".parquet")
"""Kinds of data files, by the end of their names."""

RESERVED_TEMPLATE_ARGS: Final = frozenset(
    {"messages", "tools", "documents", "tokenize", "add_generation_prompt", "chat_template"}
    | {"continue_final_message", "conversation", "return_dict", "return_tensors", "strftime_now"}
)
"""Variables of a chat template that are not the user's to set."""

_ROWS = re.compile(r"(?:-?\d+)?:(?:-?\d+)?")
_ROWS_SUFFIX = re.compile(r"(?P<path>.*)@\[(?P<rows>[^\[\]]*)\]", re.DOTALL)


def names_rows(source: Any) -> bool:
    """Whether a source is of the form `PATH@[a:b]`."""
    return isinstance(source, str) and _ROWS_SUFFIX.fullmatch(source) is not None


def without_rows_in_source(values: Any, where: str) -> Any:
    """Read `source=PATH@[a:b]` as `source=PATH`, `rows=a:b`."""
    if not isinstance(values, Mapping) or not isinstance(values.get("source"), str):
        return values
    match = _ROWS_SUFFIX.fullmatch(values["source"])
    if match is None:
        return values
    if values.get("rows") not in (None, match["rows"]):
        raise ValueError(
            f"{where}.source names rows {match['rows']}, but {where}.rows={values['rows']}; "
            "give one of the two"
        )
    return {**values, "source": match["path"], "rows": match["rows"]}


class DataSpec(Frozen):
    """Prompts and labels, how a row is read, and how a prompt is rendered."""

    source: Execution[str]
    """`generated:arithmetic`, a folder, or a .jsonl or .parquet file, local or on a web server
    (`https://`; a folder there has `<split>.jsonl`); its content is identity by `digest`.
    `PATH@[a:b]` is read as `source=PATH`, `rows=a:b`."""
    split: str = "train"
    """For a folder: the file `<split>.jsonl` or `<split>.parquet` in it."""
    rows: str | None = None
    """Use only these rows of the file: `a:b` as in Python, negative bounds count from the end."""
    digest: str | None = None
    """SHA-256 of the file's bytes; None only until `resolve` has filled it in."""
    format: Literal["messages", "prompt", "gsm8k"] = "messages"
    """`messages`: chat messages and label. `prompt`: one text and label, made into a user message
    by `template`. `gsm8k`: `question`, `answer` and `template`; the label follows `####`."""
    prompt_key: str | None = None
    """format=prompt: the row's key of the text; None is `prompt`."""
    messages_key: str | None = None
    """format=messages: the row's key of the messages; None is `messages`."""
    label_key: str | None = None
    """format=messages or prompt: the row's key of the label; None is `label`."""
    metadata_key: str | None = None
    """The row's key of what the reward is given beside the label; None gives it nothing."""
    template: str = "{question}"
    """User message made from a prompt or gsm8k row; `{question}` is replaced by its text."""
    system_prompt: str | None = None
    """Put in front of every prompt; refused where the messages have a system message already."""
    chat_template: str | None = None
    """Jinja text used instead of the model folder's own chat template."""
    chat_template_args: JsonObject = "{}"
    """Variables of the chat template, such as `{"enable_thinking": false}`."""
    prompt_ids: tuple[str, ...] = ()
    """Keep only these prompts, in this order; empty keeps all. Ids are `<split>-<row>`."""
    duplicates: Literal["refuse", "keep"] = "refuse"
    """Whether two rows may be rendered to the same prompt."""
    shuffle: bool = True
    """A fresh order each epoch from (seed, epoch); False keeps file order."""
    prompts_per_step: int = Field(ge=1)
    last_batch: Literal["drop", "carry"] = "drop"
    """Prompts that do not fill a step at the end of an epoch: left out of that epoch (others each
    time when shuffled), or completed by the first prompts of the next epoch."""
    max_prompt_tokens: int = Field(ge=1)
    too_long: Literal["drop", "refuse"] = "drop"
    """A longer prompt is dropped and counted, or the run is refused."""

    @model_validator(mode="before")
    @classmethod
    def _split_rows_off_source(cls, values: Any) -> Any:
        return without_rows_in_source(values, "data")

    @model_validator(mode="after")
    def _keys_fit_format(self) -> DataSpec:
        if self.rows is not None and _ROWS.fullmatch(self.rows) is None:
            raise ValueError(
                f"data.rows={self.rows!r} is not of the form a:b with whole numbers, each optional"
            )
        readers = {
            "prompt_key": ("prompt",),
            "messages_key": ("messages",),
            "label_key": ("messages", "prompt"),
        }
        for name, formats in readers.items():
            if getattr(self, name) is not None and self.format not in formats:
                raise ValueError(
                    f"data.{name}={getattr(self, name)!r} is read by data.format="
                    f"{' or '.join(formats)}, but data.format={self.format}"
                )
        reserved = sorted(RESERVED_TEMPLATE_ARGS & parsed(self.chat_template_args).keys())
        if reserved:
            raise ValueError(
                f"data.chat_template_args names {', '.join(reserved)}, which Lockstep sets itself"
            )
        return self
