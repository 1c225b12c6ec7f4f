"""The stage decorator: a Prefect task that leaves a row in the leg's lock.

A stage takes the name of its session and small frozen values, and returns `ArtifactRef`s or
records, never tensors. Its row holds the digests that went in and came out, the spec's fingerprint
and the attempt. Engine stages are never cached and never retried: a retry goes on from a
checkpoint.

    @stage("convert", version=1)
    def convert(session_name: str, model: ArtifactRef) -> ArtifactRef: ...
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

from engines.contracts import ArtifactRef, SegmentResult
from engines.provenance.lock import LockRow, append_row
from model_specs.fingerprint import trajectory_fingerprint
from tasks.session import session

P = ParamSpec("P")
R = TypeVar("R")


def stage(name: str, *, version: int) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function whose first parameter is a session name into a stage."""

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        @functools.wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.time()
            opened = session(str(args[0] if args else kwargs["session_name"]))
            opened.require_gpu_memory(name)
            result = function(*args, **kwargs)
            _record(name, version, args, kwargs, result, started)
            return result

        make = task(
            name=name,
            task_run_name=f"{name}-{{session_name}}",
            retries=0,
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        return make(body)

    return decorate


def _record(
    name: str,
    version: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    started: float,
) -> None:
    session_name = args[0] if args else kwargs["session_name"]
    opened = session(session_name)
    opened.fence.check()
    reused, opened.stage_reused = opened.stage_reused, False
    append_row(
        opened.folder,
        LockRow(
            stage=name,
            version=version,
            inputs=dict(_artifacts((args, kwargs))),
            outputs=dict(_artifacts(result)),
            trajectory=trajectory_fingerprint(opened.spec),
            attempt=opened.fence.token,
            cached=reused,
            environment=opened.environment,
            ambient={
                "started_at": started,
                "seconds": round(time.time() - started, 3),
                **_steps(args, result),
            },
        ),
    )


def _steps(args: tuple[Any, ...], result: Any) -> dict[str, tuple[int, int]]:
    """The steps of the segment that went in or came out, where there is one."""
    for value in (result, *args):
        if isinstance(value, SegmentResult):
            return {"steps": (value.start_step, value.end_step)}
    return {}


def _artifacts(value: Any) -> Iterator[tuple[str, str]]:
    """Kind -> digest of every artifact and segment inside nested containers and records."""
    if isinstance(value, ArtifactRef):
        yield value.kind, value.digest
    elif isinstance(value, SegmentResult):
        yield "state", value.state_digest
        yield "chain", value.chain_digest
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _artifacts(getattr(value, item.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _artifacts(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _artifacts(item)
