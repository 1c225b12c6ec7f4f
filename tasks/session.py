"""The session of a leg: its Ray cluster, engine processes and engines, as one context manager.

A flow opens it; tasks are given its name and look it up here, so that no handle ever becomes a task
parameter. A leg is one complete execution: sessions share no process, folder or cache.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from engines import guard
from engines.cluster import Cluster, EngineHandle, gather, gather_work, identities
from engines.contracts import ArtifactRef, Flip, PromptSet
from engines.environment import environment_fingerprint, require_unchanged
from engines.gates.logprobs import LogprobGate
from engines.gpu_memory import Baseline
from engines.placement import (
    Gpu,
    cluster_gpus,
    engine_name,
    place,
    require_placed,
    start_on,
    trainer_name,
)
from engines.provenance.fence import Fence
from engines.rollout.group import RolloutGroup, engine_env
from engines.runs import write_json
from engines.train.group import TrainerGroup, trainer_env
from engines.train.registry import check_supported
from model_specs.errors import EngineError
from model_specs.run_spec import RunSpec
from model_specs.variation import Variation

logger = logging.getLogger("lockstep")

ROLLOUT_ENGINE = "engines.rollout.vllm_engine:VllmEngine"

_OPEN: dict[str, LegSession] = {}


@dataclass(kw_only=True)
class LegSession:
    """What the tasks of one leg share while it is open."""

    name: str
    leg: str
    run_dir: Path
    spec: RunSpec
    fence: Fence
    cluster: Cluster
    trainer_hosts: list[EngineHandle]
    rollout_hosts: list[EngineHandle]
    processes: dict[str, dict[str, float | int]]
    placement: Mapping[str, Gpu] = field(default_factory=dict)
    """Process name -> GPU; empty on CPU."""
    flip: Flip | None = None
    variation: Variation | None = None
    """What the leg is run under on purpose; recorded, never compared."""
    trainer: TrainerGroup | None = None
    rollout: RolloutGroup | None = None
    prompts: PromptSet | None = None
    eval_prompts: dict[str, PromptSet] = field(default_factory=dict)
    """Name of an evaluation set -> its prompts."""
    start_from: int = 0
    """Step of the checkpoint that this attempt goes on from; it is never deleted."""
    stage_reused: bool = False
    """Set by a stage that found its output in the leg's folder; its lock row says so."""
    environment: str = ""
    """Fingerprint of the engines' environment; empty before they have started."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the engines' processes had when they had started."""
    gates: dict[str, Any] = field(default_factory=dict)
    """Gate name -> `tasks.gates.GateRecord`."""
    unequal_pushes: list[str] = field(default_factory=list)
    """Where sent and received weights were not equal."""
    gate: LogprobGate = field(default_factory=LogprobGate)
    groups_with_variance: int = 0
    changed_weights: int = 0
    max_grad_norm: float = 0.0
    progress_artifact: UUID | None = None
    """Prefect's id of the leg's progress artifact, once there is one."""

    @property
    def folder(self) -> Path:
        """The leg's own folder."""
        return self.run_dir / self.leg

    def require_gpu_memory(self, stage: str) -> None:
        """Require that no process but the leg's engines holds GPU memory that was free before.

        Raises:
            EngineError: One still does; names it.
        """
        if _watches_gpu(self.spec):
            own = {int(facts["pid"]) for facts in self.processes.values()}
            _gpu_memory().require_only(own, what=f"stage {stage}")

    def trainer_alone(self) -> TrainerGroup:
        """The started trainer; EngineError before it was started."""
        if self.trainer is None:
            raise EngineError(f"session {self.name}: the trainer has not been started")
        return self.trainer

    def engines(self) -> tuple[TrainerGroup, RolloutGroup, PromptSet]:
        """The started engines and the prompts; EngineError before `start_engines`."""
        if self.trainer is None or self.rollout is None or self.prompts is None:
            raise EngineError(f"session {self.name}: the engines have not been started")
        return self.trainer, self.rollout, self.prompts

    def start_engines(self, model: ArtifactRef, data: ArtifactRef, weights: ArtifactRef) -> None:
        """Make the engines in their processes and read back what environment they really have."""
        spec_json = self.spec.model_dump_json()
        created = [
            host.actor.create.remote(
                ROLLOUT_ENGINE,
                model.uri,
                spec_json,
                engine_index=index,
                policy=self.spec.numerics.policy,
            )
            for index, host in enumerate(self.rollout_hosts)
        ]
        self.start_trainer(weights)
        gather_work(created, what="start of the rollout engines", execution=self.spec.execution)
        self.rollout = RolloutGroup(self.rollout_hosts, self.spec)
        self.trainer_alone().connect(
            self.rollout, rendezvous=self.folder / f"weights-{self.fence.token}"
        )
        (self.prompts,) = gather_work(
            [
                self.rollout_hosts[0].run(
                    "engines.rollout.prompts:build_prompts", model.uri, data.uri, spec_json
                )
            ],
            what="rendering of the prompts",
            execution=self.spec.execution,
        )
        self._record_prompts(self.prompts)
        self.record_environment()

    def start_trainer(self, weights: ArtifactRef) -> None:
        """Make the trainer alone in its processes."""
        rendezvous = f"file://{self.folder / f'rendezvous-{self.fence.token}'}"
        self.trainer = TrainerGroup(self.trainer_hosts, self.spec)
        self.trainer.start(self.spec, dcp_dir=weights.uri, rendezvous=rendezvous)

    def _record_prompts(self, prompts: PromptSet) -> None:
        """Write how many prompts there are, and the first as the model is given it."""
        first = prompts.prompts[0]
        write_json(
            self.folder / "prompts.json",
            {
                "num_prompts": len(prompts.prompts),
                "num_dropped_too_long": prompts.num_dropped_too_long,
                "digest": prompts.digest,
                "first": {
                    "prompt_id": first.prompt_id,
                    "text": first.text,
                    "token_ids": list(first.token_ids),
                    "label": first.label,
                },
            },
        )
        logger.info(
            "%s prompts %d, %d longer than %d tokens left out",
            self.leg,
            len(prompts.prompts),
            prompts.num_dropped_too_long,
            self.spec.data.max_prompt_tokens,
        )

    def _read_environment(self) -> dict[str, Any]:
        environment = {"trainer": self.trainer_alone().environment()}
        if self.rollout is not None:
            environment["rollout"] = self.rollout.environment()
        return environment

    def require_environment_unchanged(self) -> None:
        """Require that the engines still have what decides bits as it was when they started.

        Raises:
            EngineError: One has not; names the variable or switch.
        """
        require_unchanged(self.facts, self._read_environment())

    def record_environment(self) -> None:
        """Write what the started engines really have, and keep its fingerprint."""
        environment = self._read_environment()
        self.facts = environment
        self._check_placement()
        if self.variation is not None:
            environment = {**environment, "ambient": {"variation": self.variation.model_dump()}}
        self.environment = environment_fingerprint(environment)
        write_json(
            self.folder / "environment.json", {**environment, "fingerprint": self.environment}
        )

    def _check_placement(self) -> None:
        """Require that every process has the GPU that it was given."""
        hosts = [*self.trainer_hosts, *self.rollout_hosts]
        placed = [host for host in hosts if host.name in self.placement]
        found = gather(
            [host.run("engines.environment:gpu_uuid") for host in placed], what="placement"
        )
        names = [host.name for host in placed]
        require_placed(
            {name: self.placement[name] for name in names}, dict(zip(names, found, strict=True))
        )


@functools.cache
def _gpu_memory() -> Baseline:
    """The memory in use before the first leg of this process."""
    return Baseline()


def _watches_gpu(spec: RunSpec) -> bool:
    return spec.execution.device == "cuda" and not spec.execution.gpu_is_shared


@contextmanager
def leg_session(
    spec: RunSpec,
    *,
    run_dir: Path,
    leg: str,
    fence: Fence,
    flip: Flip | None = None,
    variation: Variation | None = None,
    with_rollout: bool = True,
) -> Iterator[LegSession]:
    """Open the session of one leg: cluster and empty engine processes; ends them on the way out.

    `with_rollout=False` leaves the rollout engines out, where nothing is drawn.
    """
    check_supported(spec)
    guard.start()
    if _watches_gpu(spec):
        _gpu_memory().require_free(what=f"leg {leg}")
    name = f"{run_dir.name}-{leg}-{fence.token}"
    (run_dir / leg).mkdir(parents=True, exist_ok=True)
    num_engines = spec.execution.rollout_engines if with_rollout else 0
    num_processes = spec.execution.trainer_ranks + num_engines
    cluster = Cluster(
        f"run-{run_dir.name}-{fence.token}-{leg}",
        num_cpus=num_processes,
        object_store_mib=spec.execution.object_store_mib,
    )
    with cluster:
        placement = place(spec, cluster_gpus() if spec.execution.device == "cuda" else ())

        def start(name: str, env: Mapping[str, str]) -> EngineHandle:
            return cluster.start(name, num_cpus=1, **start_on(placement.get(name), env))

        rollout_hosts = [
            start(engine_name(index), engine_env(spec, policy=spec.numerics.policy))
            for index in range(num_engines)
        ]
        trainer_hosts = [
            start(trainer_name(rank), trainer_env(spec))
            for rank in range(spec.execution.trainer_ranks)
        ]
        session = LegSession(
            name=name,
            leg=leg,
            run_dir=run_dir,
            spec=spec,
            fence=fence,
            cluster=cluster,
            trainer_hosts=trainer_hosts,
            rollout_hosts=rollout_hosts,
            processes=identities([*rollout_hosts, *trainer_hosts]),
            placement=placement,
            flip=flip,
            variation=variation,
        )
        guard.look()
        for host in rollout_hosts:  # vLLM is imported while the first stages are run
            host.actor.prepare.remote(ROLLOUT_ENGINE)
        _OPEN[name] = session
        try:
            yield session
        finally:
            del _OPEN[name]


def session(name: str) -> LegSession:
    """The open session of this name."""
    try:
        return _OPEN[name]
    except KeyError:
        raise EngineError(
            f"no open session {name!r} in this process (open: {sorted(_OPEN) or 'none'}); "
            "tasks of a leg run inside the flow that opened it"
        ) from None
