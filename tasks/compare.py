"""Compare two legs or runs, and put a run's outcome together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines.provenance.diff import Comparison, compare_ledgers
from engines.provenance.lock import read_lock
from engines.provenance.verdict import Verdict, worst
from engines.runs import Run, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class LegResult:
    """What one leg ended with."""

    leg: str
    verdict: Verdict
    reason: str
    chain_digest: str
    last_step: int
    gates: Mapping[str, Any]
    processes: Mapping[str, Mapping[str, float | int]]
    cached_stages: int
    on_report: bool = False
    """Whether the leg claims nothing about alignment (`plan.gates.logprobs` is `report`, `off`, or
    `optional` and not green) and nothing was red: it is Vacuous alone, and in a twin the comparison
    alone decides."""

    @classmethod
    def failed(
        cls, leg: str, reason: str, *, verdict: Verdict = Verdict.ENGINE_FAILURE, last_step: int = 0
    ) -> LegResult:
        """Return the result of a leg that has none of its own."""
        return cls(
            leg=leg,
            verdict=verdict,
            reason=reason,
            chain_digest="",
            last_step=last_step,
            gates={},
            processes={},
            cached_stages=0,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LegResult:
        """Return what `dataclasses.asdict` and JSON have made of a result."""
        return cls(**{**values, "verdict": Verdict(values["verdict"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict of a run, its headline, and everything that was written to verdict.json."""

    verdict: Verdict
    headline: str
    details: Mapping[str, Any]


@task(name="compare", retries=0, cache_policy=NO_CACHE, persist_result=False)
def compare_legs(folder: Path, leg_a: str, leg_b: str) -> Comparison:
    """Compare two legs of a run; a cached stage in either is refused, since it proves nothing."""
    for leg in (leg_a, leg_b):
        cached = [row.stage for row in read_lock(folder / leg) if row.cached]
        if cached:
            return Comparison.incomparable(
                f"leg {leg} reused cached stages {cached}; a twin must compute every stage"
            )
    return compare_ledgers(folder / leg_a, folder / leg_b)


@task(name="compare", retries=0, cache_policy=NO_CACHE, persist_result=False)
def compare_folders(
    folder_a: Path,
    folder_b: Path,
    *,
    across: Sequence[str] = (),
    ignoring: Sequence[str] = (),
    verify: bool = False,
) -> Comparison:
    """Compare two legs of any runs; see `engines.provenance.diff.compare_ledgers`."""
    return compare_ledgers(folder_a, folder_b, across=across, ignoring=ignoring, verify=verify)


def conclude(
    run: Run,
    legs: Sequence[LegResult],
    comparison: Comparison | None = None,
    *,
    mlflow_command: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Outcome:
    """The worst of all legs and of the comparison; writes verdict.json.

    `more` is put beside the figures; its `about`, where given, in front of the headline.
    """
    verdicts = [leg.verdict for leg in legs if comparison is None or not leg.on_report]
    if comparison is not None:
        verdicts.append(comparison.verdict)
    verdict = worst(verdicts)
    headline = _headline(verdict, legs, comparison)
    if more is not None and "about" in more:
        headline = f"{more['about']}: {headline}"
    details = {
        **(more or {}),
        "run_id": run.run_id,
        "folder": str(run.folder),
        "verdict": str(verdict),
        "exit_code": verdict.exit_code,
        "headline": headline,
        "chain_digest": legs[0].chain_digest if legs else None,
        "first_divergence": str(comparison.first) if comparison and comparison.first else None,
        "alignment": _alignment(legs),
        "native_control": _native_control(legs),
        "mlflow_command": mlflow_command,
        "comparison": comparison.to_dict() if comparison else None,
        "legs": {leg.leg: asdict(leg) for leg in legs},
    }
    run.fence.check()
    write_json(run.folder / "verdict.json", details)
    return Outcome(verdict=verdict, headline=headline, details=details)


def _alignment(legs: Sequence[LegResult]) -> dict[str, Any] | None:
    """The log-prob gate over all legs: largest difference, tokens, share exactly equal."""
    found = [leg.gates["logprobs"]["figures"] for leg in legs if "logprobs" in leg.gates]
    tokens = sum(figures["num_tokens"] for figures in found)
    if not tokens:
        return None
    largest = [float(figures["max_abs_diff"]) for figures in found]
    return {
        "max_abs_diff": "nan" if any(map(math.isnan, largest)) else max(largest),
        "num_tokens": tokens,
        "exact_fraction": sum(figures["num_exact"] for figures in found) / tokens,
    }


def _native_control(legs: Sequence[LegResult]) -> dict[str, Any] | None:
    """What vLLM's native ops give where ours give 0.0; of the first leg that ran it."""
    found = (leg.gates.get("native control") for leg in legs)
    return next(
        (
            {"verdict": gate["verdict"], "max_abs_diff": gate["figures"]["max_abs_diff"]}
            for gate in found
            if gate
        ),
        None,
    )


def _headline(verdict: Verdict, legs: Sequence[LegResult], comparison: Comparison | None) -> str:
    if comparison is not None and verdict == comparison.verdict:
        return comparison.headline
    reasons = [f"leg {leg.leg}: {leg.reason}" for leg in legs if leg.verdict == verdict]
    return "; ".join(reasons) or str(verdict)
