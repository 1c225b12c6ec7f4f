"""The only module that talks to Ray: one cluster a leg, named engines, waits with deadlines.

Engines are named, non-detached actors in the namespace of their attempt, never restarted and never
retried: recovery is an explicit resume from a checkpoint. Environment variables go into the actor's
`runtime_env`, before torch loads there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_specs.errors import EngineError
from model_specs.run_spec import ExecutionSpec

logger = logging.getLogger(__name__)

WAIT_SLICE_S = 1.0
"""Ray's native wait blocks signal handlers; short slices keep the driver cancellable."""
START_ATTEMPTS = 3
STARTED_TOO_SLOWLY = "timed out during startup"
"""Ray waits 30 s for its own daemons and no variable changes that; a busy machine may need more.
Daemons that come up later carry the guard's mark and end with the run."""


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """A named engine process."""

    name: str
    actor: Any

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine; returns a reference at once."""
        return self.actor.call.remote(method, *args, **kwargs)

    def run(self, import_path: str, *args: Any, **kwargs: Any) -> Any:
        """Run `package.module:function` in the engine's process; returns a reference at once."""
        return self.actor.run.remote(import_path, *args, **kwargs)

    def on_engine(self, import_path: str, *args: Any, **kwargs: Any) -> Any:
        """Run `package.module:function` on the engine object; returns a reference at once."""
        return self.actor.on_engine.remote(import_path, *args, **kwargs)


def gather(
    references: Sequence[Any], *, what: str, timeout_s: float = 1800.0, setting: str = ""
) -> list[Any]:
    """Wait for all references and return their values in the order given.

    Args:
        references: Of calls of engines.
        what: The calls, in words, for an error.
        timeout_s: Seconds for all of them together.
        setting: Name of the field that says so, if one does.

    Raises EngineError when a process was lost, when its code raised, or at the deadline; an error
    of Lockstep's own tree that was raised inside an engine is raised here as itself.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    pending = list(references)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=WAIT_SLICE_S)
        for reference in done:
            _value(reference, what)
        if pending and time.monotonic() > deadline:
            raise EngineError(
                f"{what}: {len(pending)} of {len(references)} calls did not end within "
                f"{timeout_s:.0f} s{setting and f' ({setting})'}; the engines' logs are in Ray's "
                "session folder"
            )
    return [_value(reference, what) for reference in references]


def gather_work(references: Sequence[Any], *, what: str, execution: ExecutionSpec) -> list[Any]:
    """`gather` work that grows with model and batch, for as long as the spec allows."""
    return gather(
        references,
        what=what,
        timeout_s=execution.call_timeout_s,
        setting="execution.call_timeout_s",
    )


def _value(reference: Any, what: str) -> Any:
    import ray

    from model_specs.errors import LockstepError

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, LockstepError):
            raise error.cause from error
        raise EngineError(f"{what}: the engine raised {error}") from error
    except ray.exceptions.RayError as error:  # dead, out of memory, or never started
        raise EngineError(f"{what}: the engine process was lost: {error}") from error


class Cluster:
    """A Ray cluster for one leg: started here, or the one that `RAY_ADDRESS` names."""

    def __init__(self, namespace: str, *, num_cpus: int, object_store_mib: int) -> None:
        self.namespace = namespace
        self._num_cpus = num_cpus
        self._object_store_mib = object_store_mib
        self._handles: list[EngineHandle] = []

    def __enter__(self) -> Cluster:
        import ray

        address = os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address=address, namespace=self.namespace, log_to_driver=False)
            return self
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray starts workers at niceness 15; here they are the job, not its helpers.
        os.environ.setdefault("RAY_worker_niceness", "0")
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start_ray()
                break
            except Exception as error:
                if STARTED_TOO_SLOWLY not in str(error) or attempt == START_ATTEMPTS:
                    raise
                logger.warning("Ray's daemons did not come up within 30 s; starting them again")
        return self

    def _start_ray(self) -> None:
        import ray

        ray.init(
            address="local",
            namespace=self.namespace,
            num_cpus=self._num_cpus,
            include_dashboard=False,
            object_store_memory=self._object_store_mib * 2**20,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )

    def __exit__(self, *exc_info: object) -> None:
        import ray

        for handle in reversed(self._handles):
            try:
                ray.kill(handle.actor)
            except Exception:  # a process that is already gone is what we want
                logger.debug("engine %s was already gone", handle.name)
        self._handles.clear()
        ray.shutdown()

    def start(
        self, name: str, *, env: Mapping[str, str], num_cpus: float = 0, node_id: str | None = None
    ) -> EngineHandle:
        """Start an empty engine process with these environment variables, on any node or this one.

        GPUs are no resource that Ray is asked for: `engines.placement` gives them, by variables.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from engines.host import Host

        remote = ray.remote(max_restarts=0, max_task_retries=0, num_cpus=num_cpus)(Host)
        where = {}
        if node_id is not None:
            where["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = remote.options(name=name, runtime_env={"env_vars": dict(env)}, **where).remote()
        handle = EngineHandle(name, actor)
        self._handles.append(handle)
        return handle

    def stop(self, handle: EngineHandle) -> None:
        """End one engine process before the cluster goes."""
        import ray

        ray.kill(handle.actor)
        self._handles.remove(handle)


def identities(handles: Sequence[EngineHandle]) -> dict[str, dict[str, float | int]]:
    """Return name -> pid and start time of each engine process."""
    values = gather([h.actor.identity.remote() for h in handles], what="identity", timeout_s=300)
    return dict(zip([h.name for h in handles], values, strict=True))
