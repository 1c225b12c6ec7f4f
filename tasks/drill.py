"""Faults on purpose on the engines of a session, one after another, with a clean control."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engines.contracts import ArtifactRef
from engines.drill.bench import Bench, shown_first
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
    alarms = _controls(bench, faults)
    rows = []
    for fault in faults:
        outcome = bench.attempt(fault)
        rows.append(_row(fault, outcome))
        _show(fault, outcome)
    alarms += _controls(bench, faults)
    result = {"faults": rows, "false_alarms": [_finding(alarm) for alarm in alarms]}
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


def _controls(bench: Bench, faults: Sequence[Fault]) -> list[Finding]:
    """Run each kind of course once without a fault; everything that is found is a false alarm."""
    kinds = {
        (fault.overrides, max(f.steps for f in faults), _looks(fault)): fault for fault in faults
    }
    return [finding for fault in kinds.values() for finding in bench.control(fault)]


def _looks(fault: Fault) -> frozenset[str]:
    """What a course does beside its steps."""
    special = {"start", "preflight", "layer-wise gate"}
    return frozenset(catch.by for catch in fault.caught if catch.by in special)


def _show(fault: Fault, outcome: Outcome) -> None:
    found = shown_first(fault, outcome)
    if outcome.caught and found is not None:
        logger.info("%-42s %-16s %s", fault.name, found.by, found.where)
        return
    logger.info("%-42s MISSED: %s", fault.name, "; ".join(outcome.missed))


def _row(fault: Fault, outcome: Outcome) -> dict[str, Any]:
    found = shown_first(fault, outcome)
    return {
        "fault": fault.name,
        "does": fault.does,
        "caught": outcome.caught,
        "by": found.by if found else None,
        "where": found.where if found else None,
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
