"""The base of every spec: frozen, closed, validated also where a default is used.

A field is identity (it decides bits) unless its annotation is `Execution[...]`, which may only
stand outermost: a marker hidden inside a container would silently drop part of a value from the
fingerprint, so it is refused when the class is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict


class ExecutionMarker:
    """Marks a field that says where or how fast, never which bits."""


T = TypeVar("T")
Execution = Annotated[T, ExecutionMarker()]


def _contains_marker(annotation: Any) -> bool:
    if any(isinstance(item, ExecutionMarker) for item in getattr(annotation, "__metadata__", ())):
        return True
    return any(_contains_marker(argument) for argument in get_args(annotation))


def groups_in(annotation: Any, *, of_tuples: bool = False) -> Iterator[type[Frozen]]:
    """Yield the spec classes that a field may be, through unions and their tags.

    With `of_tuples` also those that it may hold several of, which have no dotted name.
    """
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        yield annotation
    elif of_tuples or get_origin(annotation) in (Annotated, Union, UnionType):
        for argument in get_args(annotation):
            yield from groups_in(argument, of_tuples=of_tuples)


class Frozen(BaseModel):
    """A frozen pydantic model that refuses unknown fields and nested `Execution` markers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # JSON has neither, and every process reads its spec from JSON
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a marker that is not outermost."""
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            if _contains_marker(field.annotation):
                raise TypeError(
                    f"{cls.__name__}.{name}: Execution[...] is nested inside {field.annotation}; "
                    "it may only be the outermost annotation of a field"
                )

    @classmethod
    def execution_fields(cls) -> frozenset[str]:
        """Names of the fields that are not identity."""
        return frozenset(
            name
            for name, field in cls.model_fields.items()
            if any(isinstance(item, ExecutionMarker) for item in field.metadata)
        )
