"""Options that several commands have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Set = Annotated[
    tuple[str, ...],
    Parameter(name="--set", negative=(), help="Override a spec field: key=value. Repeatable."),
]
RunsDir = Annotated[Path, Parameter(help="Folder that holds run folders.")]
Device = Annotated[
    Literal["cpu", "cuda"] | None, Parameter(help="The same as --set execution.device=DEVICE.")
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object.")]
