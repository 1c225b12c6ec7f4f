"""What decides bits must be at the end of a segment what it was when the engines started."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from engines.environment import read_back, require_unchanged
from model_specs.errors import EngineError

ENGINE = {
    "threads": 1,
    "deterministic_algorithms": False,
    "shared_ops": ["RMSNorm", "Linear"],
    "variables": {"OMP_NUM_THREADS": "1", "NCCL_ALGO": None},
    "ambient": {"pid": 1},
}


def facts() -> dict[str, Any]:
    return {"trainer": read_back(), "rollout": {"rollout-0": copy.deepcopy(ENGINE)}}


def variable(found: dict[str, Any]) -> None:
    found["rollout"]["rollout-0"]["variables"]["NCCL_ALGO"] = "Ring"


def switch(found: dict[str, Any]) -> None:
    found["trainer"]["torch"]["float32_matmul_precision"] = "medium"


def op(found: dict[str, Any]) -> None:
    found["rollout"]["rollout-0"]["shared_ops"].remove("Linear")


def gone(found: dict[str, Any]) -> None:
    del found["trainer"]["variables"]["MKL_CBWR"]
    found["trainer"]["variables"]["OMP_NUM_THREADS"] = "33"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (variable, "rollout.rollout-0.variables.NCCL_ALGO was None .* and is 'Ring' now"),
        (switch, "trainer.torch.float32_matmul_precision was '.*' .* and is 'medium' now"),
        (op, "rollout.rollout-0.shared_ops was"),
        (gone, "trainer.variables.OMP_NUM_THREADS was .* and is '33' now"),
    ],
)
def test_a_change_is_named_with_both_values(
    change: Callable[[dict[str, Any]], None], said: str
) -> None:
    before, now = facts(), facts()
    change(now)
    with pytest.raises(EngineError, match=said):
        require_unchanged(before, now)


def test_what_decides_no_bit_may_change() -> None:
    before, now = facts(), facts()
    now["rollout"]["rollout-0"]["ambient"]["pid"] = 2
    now["trainer"]["ambient"]["cpus"] = 99
    require_unchanged(before, now)
