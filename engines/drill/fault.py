"""What a fault of the drill is, what has to catch it and where.

    fault = Fault(
        name="gradient scale",
        place="trainer",
        does="every slot's loss counts twice",
        caught=(Catch(by="diff", step=2, probe="grads", name="model.embed_tokens.weight"),),
    )

The function that breaks the live thing is `engines.drill.in_<place>:<name with underscores>`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["driver", "trainer", "rollout"]
"""Process in which the fault acts."""

Catcher = Literal[
    "diff",
    "log-prob gate",
    "sent = received",
    "refusal",
    "window",
    "identity",
    "environment",
    "verify",
    "layer-wise gate",
    "preflight",
    "start",
]

CATCHERS: dict[Catcher, str] = {
    "diff": "comparison of two ledgers: first step, probe and name that differ",
    "log-prob gate": "trainer's blind score against the rollout's own log-probs, bit for bit",
    "sent = received": "digests of what was sent and of what the engine's own storage holds",
    "refusal": "an error by name; nothing goes on",
    "window": "the gate's window as a whole is Vacuous: nothing was at stake",
    "identity": "trajectory fingerprints differ: Incomparable, with the field",
    "environment": "facts read back inside the processes, as suspects of a comparison",
    "verify": "roots, chain and sample digests recomputed from the side files",
    "layer-wise gate": "hidden states of every decoder layer, element by element",
    "preflight": "probes of a started engine: alone, batched, cached",
    "start": "an engine's check of its own process at its start",
}
"""What can catch a fault, and what it is."""

WHOLE = "as a whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one catcher found, and where."""

    by: Catcher
    step: int | None = None
    probe: str | None = None
    name: str | None = None
    """Tensor, sample, field, layer, or the error's class."""
    detail: str = ""

    @property
    def where(self) -> str:
        """Say the place in a few words."""
        step = None if self.step is None else f"step {self.step}"
        return ", ".join(part for part in (step, self.probe, self.name) if part) or WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """A finding that has to be made; what is None is not asked for.

    `{sample}` in a text stands for the first sample of the first step that is run.
    """

    by: Catcher
    step: int | None = None
    probe: str | None = None
    name: str | None = None
    says: str = ""
    """Part of the finding's detail."""

    @property
    def where(self) -> str:
        """Say the place in a few words."""
        return self.said_at(Finding(by=self.by, step=self.step, probe=self.probe, name=self.name))

    def said_at(self, finding: Finding) -> str:
        """Say the place of a finding that this is met by, with what had to be said there."""
        if not self.says:
            return finding.where
        says = f'"{self.says.strip()}"'
        return says if finding.where == WHOLE else f"{finding.where}: {says}"

    def is_met_by(self, finding: Finding, *, sample: str) -> bool:
        """Whether a finding is of this catcher, at this place, and says so."""

        def same(wanted: object, found: object) -> bool:
            return wanted is None or wanted == found

        return (
            self.by == finding.by
            and same(self.step, finding.step)
            and same(self.probe, finding.probe)
            and same(self.name and self.name.format(sample=sample), finding.name)
            and self.says.format(sample=sample) in finding.detail
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault on purpose."""

    name: str
    place: Place
    does: str
    caught: tuple[Catch, ...]
    """All of these findings have to be made."""
    steps: int = 1
    """Steps that are run while it lasts."""
    overrides: tuple[str, ...] = ()
    """Of the driver's spec, with and without the fault."""
    in_drill: bool = False
    """Whether `lockstep drill` runs it unless told otherwise."""

    @property
    def breaker(self) -> str:
        """Import path of the context manager that breaks the live thing."""
        function = self.name.translate(str.maketrans("- ", "__", "'"))
        return f"engines.drill.in_{self.place}:{function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one fault."""

    fault: str
    findings: tuple[Finding, ...]
    missed: tuple[str, ...]
    """Catches that were not made."""
    where: str
    """Place of the first catch, with what it says; empty where that was not made."""
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether everything that has to catch it did, at its place."""
        return not self.missed
