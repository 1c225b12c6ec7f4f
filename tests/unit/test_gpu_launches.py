"""What the tool for several GPUs requires of a launch's own words, and of a role's process."""

from __future__ import annotations

from typing import Any

import pytest

from engines.train.group import trainer_env
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from tools.gpu import parts
from tools.gpu.legs import Leg
from tools.gpu.two_gpus import require_asked, variables_read_back

ASKED = {"NCCL_ALGO": "allreduce:tree", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def launch(*chose: str, **variables: str) -> dict[str, Any]:
    nccl = {name: value for name, value in ASKED.items() if name.startswith("NCCL_")}
    return {"variables": nccl | variables, "nccl chose": list(chose)}


def test_a_launch_has_to_run_what_was_asked_for() -> None:
    honest = launch(
        "AllReduce 2048 TREE LL", "AllReduce 16777216 TREE SIMPLE", "Broadcast 8 RING LL"
    )
    require_asked(ASKED, [honest, launch()])
    with pytest.raises(AssertionError, match=r"allreduce:tree, NCCL ran .*'RING'"):
        require_asked(ASKED, [honest, launch("AllReduce 2048 RING LL")])
    with pytest.raises(AssertionError, match="'NCCL_NVLS_ENABLE': '1'"):
        require_asked(ASKED, [honest, launch(NCCL_NVLS_ENABLE="1")])


def test_a_role_whose_process_has_other_variables_is_refused() -> None:
    spec = apply_overrides(load_recipe("tiny_cpu"), ())
    rollout = {"rollout-0": {"variables": {"LOCKSTEP_NUMERICS": "aligned"}}}
    real = {name: trainer_env(spec)[name] for name in ("NCCL_ALGO", "NCCL_NVLS_ENABLE")}
    leg = Leg(environment={"trainer": {"variables": real}, "rollout": rollout})
    assert variables_read_back(spec, leg) == {"trainer": real, "rollout": {}}
    other = {"variables": real | {"NCCL_ALGO": "Tree"}}
    with pytest.raises(AssertionError, match=r"trainer: started with .*'Ring'.*has .*'Tree'"):
        variables_read_back(spec, Leg(environment={"trainer": other, "rollout": rollout}))


def test_ranks_are_as_many_as_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, ranks in ((1, 1), (2, 2), (3, 2), (4, 4), (8, 8)):
        monkeypatch.setattr(parts, "node_gpus", lambda count=count: [("bus", 0, "uuid")] * count)
        assert parts.most_ranks("cuda") == ranks
    assert parts.most_ranks("cpu") == 2
