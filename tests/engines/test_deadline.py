"""Every wait on an engine process has a deadline: a call that hangs is an engine failure."""

from __future__ import annotations

import time

import pytest

from engines.cluster import Cluster, gather
from engines.train.group import TrainerGroup
from model_specs.errors import EngineError
from tests.engines.trainer_cases import make_spec


@pytest.mark.timeout(120)
def test_a_call_that_hangs_is_an_engine_failure_at_its_deadline() -> None:
    with Cluster("deadline", num_cpus=2, object_store_mib=80) as cluster:
        quick, stuck = (cluster.start(name, env={}, num_cpus=1) for name in ("quick", "stuck"))
        gather([handle.run("os:getpid") for handle in (quick, stuck)], what="start")
        began = time.monotonic()
        calls = [quick.run("os:getpid"), stuck.run("time:sleep", 100)]
        with pytest.raises(EngineError, match="save: 1 of 2 calls did not end within 1 s"):
            gather(calls, what="save", timeout_s=1.0)
        assert time.monotonic() - began < 10


@pytest.mark.timeout(120)
def test_the_spec_says_how_long_a_call_of_a_trainer_may_take() -> None:
    spec = make_spec()
    with Cluster("deadline", num_cpus=1, object_store_mib=80) as cluster:
        handle = cluster.start("stuck", env={}, num_cpus=1)
        gather([handle.actor.create.remote("threading:Event")], what="start")

        def trainer(seconds: float) -> TrainerGroup:
            execution = spec.execution.model_copy(update={"call_timeout_s": seconds})
            return TrainerGroup([handle], spec.model_copy(update={"execution": execution}))

        assert trainer(60.0)._all("wait", 3) == [False]
        with pytest.raises(EngineError, match=r"within 1 s \(execution.call_timeout_s\)"):
            trainer(1.0)._all("wait", 100)
