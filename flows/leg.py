"""One leg in a driver process of its own: another hash seed, temporary folder, locale, Ray session.

A process cannot change its own hash seed, and what it has imported and cached is still there; so a
leg that is varied or resumed is run by a fresh one, which does nothing else.

    result = run_elsewhere(LegRequest(folder=..., leg="b", attempt=1, variation=varied))
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import State

from engines import runs
from engines.environment import telemetry_off_env
from engines.faults import parse_flip
from engines.plan import with_log_prob_gate_alone
from engines.provenance.fence import Fence
from flows.conclusion import RedVerdictError, final_state
from flows.legs import forget_result, recorded_result, run_leg
from flows.run_request import FlipRequest
from model_specs.base import Frozen
from model_specs.run_spec import RunSpec
from model_specs.variation import Variation
from tasks.compare import LegResult

logger = logging.getLogger("lockstep")

_END_S = 20.0
_STDERR_CHARACTERS = 2000


class LegRequest(Frozen):
    """Which leg of which run, and what it is run under."""

    folder: str
    """Of the run."""
    leg: str
    attempt: int
    """Of the driver that asks: its fence is the leg's."""
    resume_step: int = 0
    """Checkpoint of leg a to go on from, with the log-prob gate alone; 0 begins from nothing."""
    flip: FlipRequest | None = None
    variation: Variation = Variation()


def run_elsewhere(request: LegRequest) -> LegResult:
    """Run a leg in a fresh process; its progress lines are ours, and it ends when we do."""
    folder = Path(request.folder)
    forget_result(folder, request.leg)
    with _environment(request.variation) as environment, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.leg", request.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                logger.info("%s", line.rstrip("\n"))
            code = process.wait()
        finally:
            _end(process)
        result = recorded_result(folder, request.leg)
        if result is not None:
            return result
        errors.seek(0)
        said = errors.read().decode("utf-8", errors="replace").strip()[-_STDERR_CHARACTERS:]
    reason = f"its process ended with status {code} and left no result: {said or 'it said nothing'}"
    logger.error("%s %s", request.leg, reason)
    return LegResult.failed(request.leg, reason)


def _end(process: subprocess.Popen[str]) -> None:
    """End a leg that still runs; its own guard then ends all that it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _environment(variation: Variation) -> Iterator[dict[str, str]]:
    """The variables of the fresh process: ours, this code, this Prefect server, the variation."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT__")}
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        **kept,
        **telemetry_off_env(),
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "PREFECT_API_URL": _server(),
        # The lines that it prints are logged by us.
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "",
        **variation.variables,
    }
    with contextlib.ExitStack() as stack:
        if variation.temporary_folder:
            # Short: the names of Ray's sockets may have 107 characters.
            folder = tempfile.TemporaryDirectory(prefix="ls-", ignore_cleanup_errors=True)
            environment["TMPDIR"] = stack.enter_context(folder)
        yield environment


def _server() -> str:
    """Address of the server of this flow run, be it a temporary one."""
    return str(get_client(sync_client=True).api_url).rstrip("/")


@flow(name="leg", flow_run_name="leg-{leg}-of-{run}")
def leg_flow(run: str, leg: str, request: LegRequest) -> State:
    """Run the leg, which leaves its result beside its ledger."""
    folder = Path(request.folder)
    spec = runs.read_spec(folder)
    spec = spec.model_copy(update={"execution": request.variation.of(spec.execution)})
    if request.resume_step:
        spec = resuming(spec)
    result = run_leg(
        spec,
        runs.Run(folder=folder, fence=Fence(request.folder, request.attempt)),
        leg,
        resume_step=request.resume_step,
        resume_from="a" if request.resume_step else None,
        flip=parse_flip(request.flip.as_text()) if request.flip else None,
        variation=request.variation,
    )
    return final_state(result.verdict, headline=result.reason, details={"run": run, "leg": leg})


def resuming(spec: RunSpec) -> RunSpec:
    """The spec of a resumed leg: preflight and controls were judged in the leg that it goes on."""
    plan = with_log_prob_gate_alone(spec.plan).model_copy(update={"evals": ()})
    return spec.model_copy(update={"plan": plan})


def main() -> None:
    """Entry point of the fresh process."""
    from flows.cli import prepare_process

    request = LegRequest.model_validate_json(sys.argv[1])
    prepare_process(as_json=False)
    time.sleep(request.variation.start_delay_s)
    state = leg_flow(Path(request.folder).name, request.leg, request, return_state=True)
    found = state.result(raise_on_failure=False)
    if isinstance(found, BaseException) and not isinstance(found, RedVerdictError):
        sys.exit(f"{type(found).__name__}: {found}")


if __name__ == "__main__":
    main()
