"""What MLflow is given of a run folder: metrics by step, parameters, tags, states.

Reading only, and without MLflow; `tasks.tracking` sends it. The layout of the folder is in
docs/architecture.md.

    folder = read_run_folder(Path("runs/20260101-120000-tiny_cpu-3f9a10"))
    folder.legs[0].steps[-1].values["reward/mean"]
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.environment import device_class, environment_fingerprint
from engines.provenance.verdict import Verdict
from model_specs.errors import ArtifactError
from model_specs.fingerprint import flattened, plan_fingerprint, trajectory_fingerprint
from model_specs.json_text import read_json
from model_specs.run_spec import RunSpec
from tasks.samples_table import read_json_lines

logger = logging.getLogger(__name__)

MAX_VALUE_CHARACTERS = 500
"""Longest parameter or tag value; a longer one is cut and ends with its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The metrics of one step of a leg."""

    step: int
    elapsed_ms: int
    """Since the start of the leg, by the sum of `perf/step_s`."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A sub-folder that has a ledger."""

    name: str
    folder: Path
    steps: tuple[StepMetrics, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedFolder:
    """A run folder as it is now."""

    path: Path
    run_id: str
    spec: RunSpec
    verdict: Mapping[str, Any] = field(default_factory=dict)
    legs: tuple[Leg, ...]

    @property
    def kind(self) -> str:
        """`run`, or `comparison` for the folder of a comparison, which has no legs of its own."""
        return str(self.verdict.get("kind", "run"))


def read_run_folder(run_dir: Path) -> TrackedFolder:
    """Read what MLflow is given.

    Raises:
        ArtifactError: `run.json` or `spec.json` is missing, or a file is not what it should be.
    """
    path = run_dir.resolve()
    run = read_json(path / "run.json")
    if not isinstance(run.get("run_id"), str):
        raise ArtifactError(f"{path / 'run.json'} has no run_id; its fields are {sorted(run)}")
    verdict_path = path / "verdict.json"
    try:
        spec = RunSpec.model_validate_json((path / "spec.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path / 'spec.json'} is not a readable RunSpec: {error}") from error
    folders = sorted(entry.parent for entry in path.glob("*/ledger.jsonl"))
    return TrackedFolder(
        path=path,
        run_id=run["run_id"],
        spec=spec,
        verdict=read_json(verdict_path) if verdict_path.exists() else {},
        legs=tuple(
            Leg(name=folder.name, folder=folder, steps=_read_metrics(folder / "metrics.jsonl"))
            for folder in folders
        ),
    )


def _read_metrics(path: Path) -> tuple[StepMetrics, ...]:
    """Read the metrics by step; of several lines of a step the later values win."""
    by_step: dict[int, dict[str, float]] = {}
    for row in read_json_lines(path):
        step, values = row.get("step"), row.get("metrics")
        if not isinstance(step, int) or not isinstance(values, dict):
            raise ArtifactError(
                f'{path}: expected {{"step": int, "metrics": {{...}}}}, found {row}'
            )
        by_step.setdefault(step, {}).update(
            {name: _metric_value(path, step, name, value) for name, value in values.items()}
        )
    elapsed_s = 0.0
    steps = []
    for step in sorted(by_step):
        values = by_step[step]
        seconds = values.get("perf/step_s", 0.0)
        elapsed_s += seconds if math.isfinite(seconds) and seconds > 0 else 0.0
        stamp = int(elapsed_s * 1000) + step
        steps.append(StepMetrics(step=step, elapsed_ms=stamp, values=values))
    return tuple(steps)


def _metric_value(path: Path, step: int, name: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    raise ArtifactError(f"{path}, step {step}: metric {name} is {value!r}, which is not a number")


def spec_params(spec: RunSpec) -> dict[str, str]:
    """Return dotted field -> value as text, for every field of trajectory and plan."""
    fields = flattened(spec, part="identity")
    return {name: shortened(_text(value)) for name, value in fields.items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def shortened(value: str) -> str:
    """Cut a long value, so that the store does not; two that differ stay different."""
    if len(value) <= MAX_VALUE_CHARACTERS:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:32]
    ending = f"... ({len(value)} characters, sha256 {digest})"
    return value[: MAX_VALUE_CHARACTERS - len(ending)] + ending


def spec_tags(spec: RunSpec) -> dict[str, str]:
    """Return recipe and fingerprints: what runs are searched by."""
    origin = spec.origin
    parent = {"lockstep.parent": f"{origin.run}/{origin.leg}@{origin.step}"} if origin else {}
    return {
        "lockstep.recipe": spec.recipe,
        "lockstep.trajectory_fingerprint": trajectory_fingerprint(spec),
        "lockstep.plan_fingerprint": plan_fingerprint(spec),
        **parent,
    }


def leg_tags(leg: Leg, *, device: str) -> dict[str, str]:
    """Return what legs are found by: environment, device class, code, newest chain digest.

    Each as far as it is there.
    """
    tags = {}
    environment = leg.folder / "environment.json"
    if environment.exists():
        facts = read_json(environment)
        tags["lockstep.environment_fingerprint"] = environment_fingerprint(facts)
        trainer = facts.get("trainer", {})
        if "cpu" in trainer:
            tags["lockstep.device_class"] = device_class(device, trainer)
        if "code_digest" in trainer:
            tags["lockstep.code_digest"] = str(trainer["code_digest"])
    chain = newest_chain(leg.folder)
    if chain is not None:
        tags["lockstep.chain_digest"] = chain
    return tags


def newest_chain(leg_folder: Path) -> str | None:
    """Return the chain digest of the newest update; None for a ledger without one."""
    lines = read_json_lines(leg_folder / "ledger.jsonl")
    chains = [str(line["chain"]) for line in lines if "chain" in line]
    return chains[-1] if chains else None


def verdict_tags(verdict: Mapping[str, Any]) -> dict[str, str]:
    """Return verdict, first divergence and chain digest of the run."""
    if not verdict:
        return {"lockstep.verdict": "none yet"}
    first = verdict.get("first_divergence")
    sides = [str(side["label"]) for side in verdict.get("sides", ())]
    tags = {
        **({"lockstep.compared": " ".join(sides)} if sides else {}),
        "lockstep.verdict": str(verdict.get("verdict")),
        "lockstep.first_divergence": "none" if first is None else _text(first),
    }
    if "chain_digest" in verdict:
        tags["lockstep.chain_digest"] = _text(verdict["chain_digest"])
    night = verdict.get("night")
    # By these tonight finds the last green one. A night that was resumed is none any more: nothing
    # of it was compared with the night before.
    tags["lockstep.night"] = "true" if night else "false"
    if night:
        tags["lockstep.device_class"] = str(night["device_class"])
        tags["lockstep.first_suspect"] = str(night["first_suspect"] or "none")
    return tags


def verdict_points(verdict: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """Return (metric, step, value) of `repro/*`; none when the verdict compared nothing.

    `repro/identical` is 1 for each step before the first difference and 0 from it on, so that a
    chart shows where it drops. `repro/max_ulp` is 0 where all bits are equal, and at the first
    difference the largest distance, where it is known.
    """
    comparison = verdict.get("comparison") or {}
    outcome = comparison.get("verdict")
    if outcome not in (Verdict.IDENTICAL, Verdict.DIVERGED):
        return []
    first = comparison.get("first") if outcome == Verdict.DIVERGED else None
    start = int(comparison.get("start_step", 0))
    last = start + int(comparison["common_steps"])
    differs_at = int(first["step"]) if first else last + 1
    equal = range(start + 1, min(differs_at, last + 1))
    points = [(name, step, value) for step in equal for name, value in _EQUAL_POINTS]
    if first:
        points += [("repro/identical", step, 0.0) for step in range(differs_at, last + 1)]
        if first.get("max_ulp") is not None:
            points.append(("repro/max_ulp", differs_at, float(first["max_ulp"])))
    return points


_EQUAL_POINTS = (("repro/identical", 1.0), ("repro/max_ulp", 0.0))


def run_status(verdict: Mapping[str, Any]) -> str:
    """Return MLflow's status of the run: as the flow run's state, green or not."""
    if not verdict:
        return "RUNNING"
    if verdict.get("verdict") == "Cancelled":
        return "KILLED"
    green = verdict.get("verdict") in (Verdict.IDENTICAL, Verdict.ALIGNED)
    return "FINISHED" if green else "FAILED"


def leg_status(verdict: Mapping[str, Any]) -> str:
    """Return the status of a leg: one that was only found to differ did finish."""
    if verdict.get("verdict") in (Verdict.ENGINE_FAILURE, "Cancelled"):
        return run_status(verdict)
    return "FINISHED" if verdict else "RUNNING"


def git_tags(file: Path) -> dict[str, str]:
    """Return commit and dirty flag of the checkout in which `file` is tracked, if it is."""
    here = file.resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's checkout; its commit says nothing.
        git("ls-files", "--error-unmatch", here.name)
        commit, dirty = git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("no git commit is recorded: %s", error)
        return {}
    return {
        "git.commit": commit,
        "git.dirty": str(dirty).lower(),
        "mlflow.source.git.commit": commit,
    }


def started_ms(folder: Path) -> int:
    """Return when the oldest file of the folder was last written: near to when it began."""
    times = [entry.stat().st_mtime for entry in folder.iterdir() if entry.is_file()]
    return int(min(times) * 1000)


def file_digest(path: Path) -> str:
    """Return 32 hex characters of the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
