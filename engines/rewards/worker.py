"""The process in which an isolated reward runs: reads a request file, answers a line a sample.

Started by `engines.rewards.isolated` alone. Standard output carries the answers, so whatever the
reward prints goes to standard error. A line is `{"ready": true}`, `{"value": HEX}`,
`{"error": TEXT}` (about one sample) or `{"refused": TEXT}` (about the reward as a whole).
"""

from __future__ import annotations

import ctypes
import json
import numbers
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.delays import pause
from model_specs.errors import SpecError
from model_specs.run_spec import RewardSpec
from model_specs.user_code import load, locate

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Score all items of the request that the command line names."""
    _, _, request_file, is_reversed, parent = sys.argv
    _die_with(int(parent))
    answers = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    request = json.loads(Path(request_file).read_text(encoding="ascii"))
    spec = RewardSpec.model_validate_json(request["spec"])
    try:
        score = _function(spec)
    except SpecError as error:
        _answer(answers, refused=str(error))
        return
    _answer(answers, ready=True)
    items = request["items"]
    for item in reversed(items) if is_reversed == "1" else items:
        _answer(answers, **_scored(score, item, spec))


def _die_with(parent: int) -> None:
    """End this process when the thread that started it ends, also by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _function(spec: RewardSpec) -> Callable[..., Any]:
    if not spec.is_own_code:
        from engines.rewards import REWARDS

        return REWARDS[spec.name]
    code = locate(spec.name, recorded_file=spec.source)
    if spec.digest is not None and code.digest != spec.digest:
        raise SpecError(
            f"reward {code.name}: its sources at {code.file} have digest {code.digest}, but the "
            f"run started with {spec.digest}; a run keeps its reward: restore the sources"
        )
    return load(code)


def _scored(score: Callable[..., Any], item: dict[str, Any], spec: RewardSpec) -> dict[str, Any]:
    metadata = item["metadata"]
    pause()
    try:
        value = score(
            item["text"],
            item["label"],
            spec=spec,
            finish_reason=item["finish_reason"],
            metadata=None if metadata is None else json.loads(metadata),
        )
    except Exception as error:  # whatever the user's function raises
        return {"error": f"raised {type(error).__name__}: {error}"}
    if not isinstance(value, numbers.Real):
        return {"error": f"returned a {type(value).__name__} ({value!r}), not a number"}
    return {"value": float(value).hex()}


def _answer(answers: Any, **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
