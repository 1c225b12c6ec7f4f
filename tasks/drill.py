"""Faults on purpose on the engines of a session, one after another, with a clean control."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engines.contracts import ArtifactRef
from engines.drill.bench import Bench
from engines.drill.catalogue import chosen_faults
from engines.drill.fault import CATCHERS, Fault, Finding, Outcome
from engines.runs import write_json
from tasks.session import session
from tasks.stage import stage

logger = logging.getLogger("lockstep")

DRILL_FILE = "drill.json"


@stage("drill", version=1)
def drill(
    session_name: str,
    model: ArtifactRef,
    data: ArtifactRef,
    weights: ArtifactRef,
    names: tuple[str, ...],
) -> dict[str, Any]:
    """Try every fault on the started engines; returns what is written to drill.json.

    The control, every course without a fault, is run before the first fault and after the last.
    """
    bench = _bench(session_name, model, data)
    bench.prepare(weights)
    faults = chosen_faults(names)
    logger.info("%-42s %-16s %s", "fault", "caught by", "where")
    controls = _controls(faults)
    alarms = [alarm for control in controls for alarm in bench.control(control)]
    rows = []
    for fault in faults:
        outcome = bench.attempt(fault)
        rows.append(_row(fault, outcome))
        _show(fault, outcome)
    alarms += [alarm for control in controls for alarm in bench.control(control)]
    result = {
        "faults": rows,
        "num_controls": 2 * len(controls),
        "false_alarms": [_finding(alarm) for alarm in alarms],
    }
    write_json(session(session_name).run_dir / DRILL_FILE, result)
    return result


def _bench(session_name: str, model: ArtifactRef, data: ArtifactRef) -> Bench:
    opened = session(session_name)
    trainer, rollout, _ = opened.engines()
    return Bench(
        trainer=trainer,
        rollout=rollout,
        trainer_hosts=opened.trainer_hosts,
        rollout_hosts=opened.rollout_hosts,
        spec=opened.spec,
        model_dir=model.uri,
        data_file=data.uri,
        folder=opened.folder / "drill",
    )


def _controls(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """One fault for each kind of course; without the fault, all that its course finds is false."""
    return tuple({(f.overrides, f.steps, _looks(f)): f for f in faults}.values())


def _looks(fault: Fault) -> frozenset[str]:
    """What a course does beside its steps."""
    special = {"start", "preflight", "layer-wise gate"}
    return frozenset(catch.by for catch in fault.caught if catch.by in special)


def _show(fault: Fault, outcome: Outcome) -> None:
    if outcome.caught:
        logger.info("%-42s %-16s %s", fault.name, fault.caught[0].by, outcome.where)
    else:
        logger.info("%-42s MISSED: %s", fault.name, "; ".join(outcome.missed))


def _row(fault: Fault, outcome: Outcome) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "does": fault.does,
        "caught": outcome.caught,
        "by": fault.caught[0].by if outcome.where else None,
        "where": outcome.where,
        "missed": list(outcome.missed),
        "findings": [_finding(finding) for finding in outcome.findings],
        "seconds": round(outcome.seconds, 2),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "by": finding.by,
        "is": CATCHERS[finding.by],
        "step": finding.step,
        "probe": finding.probe,
        "name": finding.name,
        "where": finding.where,
        "detail": finding.detail,
    }
