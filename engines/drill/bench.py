"""The bench that faults are tried on: started engines, a checkpoint, and a clean leg beside them.

Every fault is given the same course. The trainer is moved to another state, then the segment after
step 2 is begun as a resumed run begins it: state from the checkpoint, first push, and some steps
into a ledger of its own. What caught something is collected: the gates, sent = received, errors by
name, the comparison with the clean leg, what the processes say of themselves. Invariant: a fault is
given engines whose state digest is the checkpoint's and whose stored weights are what was sent;
without a fault the course finds nothing (`Bench.control`).

    bench = Bench(trainer=trainer, rollout=rollout, ...)
    bench.prepare(weights)
    assert not bench.control(fault)
    outcome = bench.attempt(fault)
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.cluster import EngineHandle, gather
from engines.contracts import ArtifactRef, PromptSet, SampleRequest, TrainSample
from engines.data import prompt_order
from engines.drill.fault import Fault, Finding, Outcome
from engines.environment import require_unchanged
from engines.gates.layerwise import compare_layers
from engines.gates.logprobs import LogprobGate
from engines.host import load
from engines.loop import StepOutcome, initial_push, push, sample_requests, steps
from engines.provenance.descent import natural_order
from engines.provenance.diff import compare_ledgers
from engines.provenance.fence import Fence, RunFolder
from engines.provenance.ledger import LEDGER_FILE, LedgerHeader, LedgerWriter, verify_ledger
from engines.provenance.verdict import Verdict
from engines.rollout.group import RolloutGroup
from engines.runs import write_json, write_spec
from engines.train.group import TrainerGroup
from model_specs.errors import EngineError, LockstepError
from model_specs.fingerprint import plan_fingerprint, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.run_spec import RunSpec

START_STEP = 2
"""Step of the checkpoint that every course resumes from."""
AWAY_STEP = 1
"""Step of the state that the trainer holds before it resumes."""
LONGEST = 2
"""Most steps of a course."""


@dataclass(kw_only=True)
class Bench:
    """Started engines with the folder of the drill."""

    trainer: TrainerGroup
    rollout: RolloutGroup
    trainer_hosts: Sequence[EngineHandle]
    rollout_hosts: Sequence[EngineHandle]
    spec: RunSpec
    model_dir: str
    data_file: str
    folder: Path
    checkpoints: dict[int, ArtifactRef] = field(default_factory=dict)
    """Step -> committed checkpoint; a fault may put another in place of the first."""
    references: dict[tuple[str, ...], Path] = field(default_factory=dict)
    """Overrides -> clean leg of the longest course."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """What the processes had before the first fault."""
    names: Iterator[int] = field(default_factory=itertools.count)

    def prepare(self, weights: ArtifactRef) -> None:
        """Train two steps from the initial weights and keep a checkpoint of each."""
        self.environment = self._environment()
        self.trainer.load(weights.uri)
        push(self.trainer, self.rollout, version=0, flip=None, keep=None)
        outcomes = steps(
            self.trainer,
            self.rollout,
            self.spec,
            self.prompts(),
            start=0,
            stop=START_STEP,
            commit=lambda *_: None,
        )
        for outcome in outcomes:
            step = outcome.record.step
            path = self.folder / "checkpoints" / f"step-{step:06d}"
            digest = self.trainer.save(path, chain_digest="", attempt=1, run_folder=None)
            self.checkpoints[step] = ArtifactRef(uri=str(path), kind="checkpoint", digest=digest)

    def prompts(self) -> PromptSet:
        """Render and tokenise all prompts in the rollout engine's process."""
        found: PromptSet
        (found,) = gather(
            [
                self.rollout_hosts[0].run(
                    "engines.rollout.prompts:build_prompts",
                    self.model_dir,
                    self.data_file,
                    self.spec.model_dump_json(),
                )
            ],
            what="rendering of the prompts",
        )
        return found

    @functools.cached_property
    def sample(self) -> str:
        """Request id of the first sample of the first step, in the order of a comparison."""
        return min((r.request_id for r in self._requests()), key=natural_order)

    def _requests(self) -> tuple[SampleRequest, ...]:
        prompts, step = self.prompts().prompts, START_STEP + 1
        chosen = [prompts[i] for i in prompt_order(len(prompts), self.spec, step)]
        return sample_requests(chosen, self.spec, step)

    # -- one fault

    def control(self, fault: Fault) -> tuple[Finding, ...]:
        """Run a fault's course without the fault; all that is found is a false alarm."""
        self.reference(fault.overrides)
        self.restore()
        return self._course(fault)

    def attempt(self, fault: Fault) -> Outcome:
        """Run the course with the fault, and say what caught it."""
        began = time.monotonic()
        self.reference(fault.overrides)
        self.restore()
        sample = self.sample
        with self.broken(fault):
            findings = self._course(fault)
        met = {
            catch: next((f for f in findings if catch.is_met_by(f, sample=sample)), None)
            for catch in fault.caught
        }
        first = met[fault.caught[0]]
        return Outcome(
            fault=fault.name,
            findings=findings,
            missed=tuple(
                f"{catch.by} at {catch.where}".format(sample=sample)
                for catch, finding in met.items()
                if finding is None
            ),
            where="" if first is None else fault.caught[0].said_at(first).format(sample=sample),
            seconds=time.monotonic() - began,
        )

    def restore(self) -> None:
        """Bring both engines to the checkpoint, whatever the last fault left behind.

        Raises:
            EngineError: The state is not the checkpoint's, or the weights did not arrive.
        """
        start = self.checkpoints[START_STEP]
        self.trainer.load(start.uri)
        state = self.trainer.state_digest()
        if state != start.digest:
            raise EngineError(f"the drill holds state {state} instead of {start.digest}")
        _, _, unequal = push(self.trainer, self.rollout, version=START_STEP, flip=None, keep=None)
        if unequal:
            raise EngineError(f"the last fault is still there: {unequal[0]}")

    @contextmanager
    def broken(self, fault: Fault) -> Iterator[None]:
        """Break what the fault breaks, in the process it is in, while the block lasts."""
        if fault.place == "driver":
            with load(fault.breaker)(self):
                yield
            return
        hosts = self.trainer_hosts if fault.place == "trainer" else self.rollout_hosts
        live = "engines.drill.live:"
        gather(
            [host.on_engine(f"{live}start_fault", fault.breaker) for host in hosts], what="fault"
        )
        try:
            yield
        finally:
            gather([host.on_engine(f"{live}end_fault") for host in hosts], what="end of the fault")

    # -- the course

    def reference(self, overrides: tuple[str, ...]) -> Path:
        """The clean leg that a course with these overrides is compared with."""
        if overrides not in self.references:
            self.restore()
            folder = self._new_leg()
            found = self._drive(folder, overrides, num_steps=LONGEST)
            if found:
                raise EngineError(f"the clean leg of the drill is not clean: {found[0]}")
            self.references[overrides] = folder
        return self.references[overrides]

    def _course(self, fault: Fault) -> tuple[Finding, ...]:
        reference = self.reference(fault.overrides)
        wanted = {catch.by for catch in fault.caught}
        if wanted == {"start"}:
            return self._start()
        findings: list[Finding] = []
        for by, look in (("preflight", self._preflight), ("layer-wise gate", self._layers)):
            if by in wanted:
                findings += look()
        if wanted <= {"preflight", "layer-wise gate"}:
            return tuple(findings)
        folder = self._new_leg()
        findings += self._drive(folder, fault.overrides, num_steps=fault.steps)
        if (folder / LEDGER_FILE).is_file():  # not where the first thing was refused
            findings += _compared(reference, folder)
            findings += _verified(folder)
        return tuple(findings)

    def _new_leg(self) -> Path:
        return self.folder / "legs" / f"{next(self.names):03d}"

    def _drive(self, folder: Path, overrides: tuple[str, ...], *, num_steps: int) -> list[Finding]:
        """Resume from the checkpoint, run some steps into a ledger; what was found on the way."""
        spec = apply_overrides(self.spec, overrides)
        fence = RunFolder.create(folder, run_id="drill").new_attempt()
        gate, outcomes = LogprobGate(), []
        findings: list[Finding] = []
        try:
            for outcome in self._outcomes(folder, spec, fence, num_steps=num_steps):
                outcomes.append(outcome)
                findings += _judged(outcome)
                if outcome.gate is not None:
                    gate.add(outcome.gate)
        except LockstepError as error:
            kind = type(error).__name__
            return [*findings, Finding(by="refusal", name=kind, detail=str(error))]
        result = gate.final(
            groups_with_variance=sum(o.groups_with_variance for o in outcomes),
            max_grad_norm=max(o.record.metrics.get("train/grad_norm", 0.0) for o in outcomes),
            changed_weights=sum(o.changed_weights for o in outcomes),
        )
        if result.verdict is Verdict.VACUOUS:
            findings.append(Finding(by="window", detail=result.reason))
        return findings

    def _outcomes(
        self, folder: Path, spec: RunSpec, fence: Fence, *, num_steps: int
    ) -> Iterator[StepOutcome]:
        """Yield the first push and every update, each already in the ledger of `folder`."""
        start = self.checkpoints[START_STEP]
        self.trainer.load(self.checkpoints[AWAY_STEP].uri)
        self.trainer.ensure_at(start.uri, start.digest)
        write_spec(folder, spec)
        write_json(folder / "environment.json", self._environment())
        ledger = LedgerWriter(
            folder,
            header=LedgerHeader(
                run_id="drill",
                leg="a",
                trajectory=trajectory_fingerprint(spec),
                plan=plan_fingerprint(spec),
                start_step=START_STEP,
            ),
            fence=fence,
        )
        first = initial_push(self.trainer, self.rollout, step=START_STEP, state_digest=start.digest)
        ledger.append(first.record, first.values)
        yield first
        for outcome in steps(
            self.trainer,
            self.rollout,
            spec,
            self.prompts(),
            start=START_STEP,
            stop=START_STEP + num_steps,
            commit=ledger.commit,
        ):
            ledger.append(outcome.record, outcome.values)
            yield outcome
        require_unchanged(self.environment, self._environment())

    def _environment(self) -> dict[str, Any]:
        return {"trainer": self.trainer.environment(), "rollout": self.rollout.environment()}

    def _layers(self) -> list[Finding]:
        folder = self._new_leg()
        requests = [request for request in self._requests() if request.sample_index == 0][:2]
        (samples,) = gather(
            [self.rollout_hosts[0].call("layer_states", requests, folder=str(folder))],
            what="hidden states of the rollout",
        )
        scored = [TrainSample.of(sample) for sample in samples]
        self.trainer.layer_states(scored, folder=folder)
        result = compare_layers(
            folder,
            {request.request_id: len(request.prompt_token_ids) for request in requests},
            num_layers=self.spec.model.num_layers,
        )
        if result.verdict.is_green:
            return []
        layer = None if result.first is None else f"layer {result.first.layer}"
        return [Finding(by="layer-wise gate", name=layer, detail=result.reason)]

    def _preflight(self) -> list[Finding]:
        try:
            results = self.rollout.preflight()
        except LockstepError as error:
            return [Finding(by="preflight", name=type(error).__name__, detail=str(error))]
        return [
            Finding(by="preflight", name=name, detail=result["reason"])
            for name, result in results.items()
            if not Verdict(result["verdict"]).is_green
        ]

    def _start(self) -> tuple[Finding, ...]:
        checks = [host.call("check_process") for host in self.rollout_hosts]
        try:
            gather(checks, what="check of the process")
        except LockstepError as error:
            return (Finding(by="start", name=type(error).__name__, detail=str(error)),)
        return ()


def _judged(outcome: StepOutcome) -> list[Finding]:
    """What the gate and sent = received say of one update."""
    findings = []
    step, digests, gate = outcome.record.step, outcome.record.digests, outcome.gate
    if gate is not None and gate.violations():
        name = gate.worst.request_id if gate.worst else None
        detail = gate.violations()[0]
        findings.append(Finding(by="log-prob gate", step=step, name=name, detail=detail))
    sent, received = digests.get("sent", {}), digests.get("received", {})
    unequal = sorted(n for n in sent.keys() | received.keys() if sent.get(n) != received.get(n))
    if unequal:
        detail = f"{len(unequal)} of {len(sent)} tensors"
        findings.append(Finding(by="sent = received", step=step, name=unequal[0], detail=detail))
    return findings


def _compared(reference: Path, folder: Path) -> list[Finding]:
    """What a comparison with the clean leg says; a leg that ended early is compared so far."""
    try:
        found = compare_ledgers(reference, folder)
    except LockstepError as error:
        return [Finding(by="diff", name=type(error).__name__, detail=str(error))]
    findings = [
        Finding(by="environment", name=name, detail=f"{ours!r}, then {theirs!r}")
        for name, ours, theirs in found.environment_differences
    ]
    if found.verdict is Verdict.INCOMPARABLE:
        fields = [name for name, _, _ in found.identity_differences]
        findings.append(Finding(by="identity", name=fields[0], detail=found.headline))
    if found.first is not None:
        findings.append(
            Finding(
                by="diff",
                step=found.first.step,
                probe=found.first.probe,
                name=found.first.name,
                detail=str(found.first),
            )
        )
    return findings


def _verified(folder: Path) -> list[Finding]:
    try:
        verify_ledger(folder)
    except LockstepError as error:
        return [Finding(by="verify", name=type(error).__name__, detail=str(error))]
    return []
