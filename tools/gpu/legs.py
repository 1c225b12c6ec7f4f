"""Short runs of the product's engines for the GPU tools: same prompts and rewards in every one.

Engines directly, without Prefect and MLflow: random weights of a recipe's shape, random prompts,
and a reward that is a function of the sampled tokens, so that groups have variance without a
trained model. What a leg returns is compared across layouts, transports and processes: digests of
every probe, the chain over them, and the gate.

    world = World.make(shape="gsm8k_smollm2_135m", device="cuda", folder=Path("legs"))
    leg = run_leg(world, world.spec(trainer_ranks=2), name="two ranks", steps=3)
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import guard
from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import PROBES, Prompt, Sample, StepRecord
from engines.loop import DrawnStep, StepOutcome, initial_push, sample_requests, train_step
from engines.placement import (
    Gpu,
    cluster_gpus,
    engine_name,
    place,
    require_placed,
    start_on,
    trainer_name,
)
from engines.provenance.digest import CHAIN_START
from engines.provenance.ledger import extend_chain, roots_of
from engines.rollout.group import RolloutGroup, engine_env
from engines.train.advantages import group_advantages, round_to_float32
from engines.train.group import TrainerGroup, trainer_env
from model_specs.errors import EngineError
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

Digests = dict[str, Mapping[str, Mapping[str, str]]]
"""`<step>.<update>` -> probe -> name -> digest."""


@dataclass(kw_only=True)
class Leg:
    """What one run left behind."""

    chain: str = ""
    """Over all its records; comparable only with a leg of the same steps that drew."""
    digests: Digests = field(default_factory=dict)
    drawn: list[DrawnStep] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    """Step -> state digest, where a checkpoint was written."""

    def summary(self) -> dict[str, Any]:
        """Return the figures that are printed."""
        rounded = {name: [round(s, 3) for s in row] for name, row in self.seconds.items()}
        return {
            "chain": self.chain,
            "gate": self.gate,
            "norms": self.norms,
            "seconds": rounded,
            "memory": self.memory,
        }


@dataclass(frozen=True, kw_only=True)
class World:
    """Model, masters and prompts that all legs share."""

    base: RunSpec
    folder: Path
    device: str

    @classmethod
    def make(cls, *, shape: str, device: str, folder: Path) -> World:
        """Write random weights of a recipe's shape and convert them, once a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        spec = load_recipe(shape)
        is_tiny = device == "cpu"
        sampling = spec.sampling.model_copy(
            update={
                "samples_per_prompt": 4,
                "max_new_tokens": 12 if is_tiny else 64,
                "temperature": 1.0,
            }
        )
        parts = {
            "sampling": sampling.model_dump(),
            "data": {
                **spec.data.model_dump(),
                "prompts_per_step": 4 if is_tiny else 16,
                "prompt_ids": (),
            },
            "optimizer": {**spec.optimizer.model_dump(), "lr": 1e-3 if is_tiny else 1e-5},
            "reduction": {"kind": "tree", "slots": 8},
            "plan": {"num_steps": 8, "checkpoint_every": 1, "keep_tensor_steps": 0},
            "execution": {
                "device": device,
                "kv_cache_mib": 64 if is_tiny else 4096,
                "max_num_seqs": 32 if is_tiny else 64,
                "bucket_mib": 1 if is_tiny else 64,
                "object_store_mib": 100 if is_tiny else 2048,
            },
        }
        base = RunSpec.model_validate({**spec.model_dump(), **parts})
        return cls(base=base, folder=folder, device=device)

    @property
    def model(self) -> str:
        """Hugging Face folder."""
        return str(self.folder / "model")

    @property
    def masters(self) -> str:
        """Converted folder."""
        return str(self.folder / "dcp")

    def spec(self, *, parts: Mapping[str, Any] | None = None, **execution: Any) -> RunSpec:
        """Return the spec with these execution fields and, under `parts`, whole other parts."""
        merged = {
            **self.base.model_dump(),
            "execution": {**self.base.execution.model_dump(), **execution},
            **(parts or {}),
        }
        return RunSpec.model_validate(merged)

    def prompts(self, step: int) -> tuple[Prompt, ...]:
        """Return the prompts of a step: random tokens, the same everywhere."""
        source = random.Random(step)
        limit = min(self.base.data.max_prompt_tokens, 200)
        return tuple(
            Prompt(
                prompt_id=f"random-{step}-{index}",
                token_ids=tuple(
                    source.randrange(4, self.base.model.vocab_size)
                    for _ in range(source.randrange(8, limit))
                ),
                text="",
                label="",
            )
            for index in range(self.base.data.prompts_per_step)
        )


def write_model(folder: str, masters: str, spec_json: str) -> None:
    """Write random weights of the spec's shape and convert them; runs in a rank's process."""
    from engines.checkpoint.convert import convert_hf_to_dcp
    from tools.gpu.shapes import write_random_model

    spec = RunSpec.model_validate_json(spec_json)
    write_random_model(folder, spec_json)
    convert_hf_to_dcp(folder, masters, spec.model)


class Processes:
    """Named processes, each on the GPU that the spec's placement gives it."""

    def __init__(self, cluster: Cluster, spec: RunSpec, *, with_engines: bool) -> None:
        gpus = cluster_gpus() if spec.execution.device == "cuda" else ()
        self.placement: dict[str, Gpu] = place(spec, gpus)
        policy = spec.numerics.policy
        engines = range(spec.execution.rollout_engines if with_engines else 0)
        self.engines = [
            cluster.start(name, **start_on(self.placement.get(name), engine_env(spec, policy)))
            for name in map(engine_name, engines)
        ]
        self.trainers = [
            cluster.start(name, **start_on(self.placement.get(name), trainer_env(spec)))
            for name in map(trainer_name, range(spec.execution.trainer_ranks))
        ]

    def found(self) -> dict[str, str]:
        """Return name -> PCI bus id of each process's GPU, or what is wrong about them."""
        handles = [h for h in (*self.trainers, *self.engines) if h.name in self.placement]
        found = gather([h.run("engines.environment:gpu_uuid") for h in handles], what="placement")
        names = [handle.name for handle in handles]
        try:
            chosen = {name: self.placement[name] for name in names}
            require_placed(chosen, dict(zip(names, found, strict=True)))
        except EngineError as error:  # what the legs found is not thrown away for it
            return {"wrong": str(error)}
        return {name: self.placement[name].pci_bus_id for name in names}


@contextmanager
def processes(world: World, spec: RunSpec, *, name: str, with_engines: bool) -> Iterator[Processes]:
    """Start a cluster with empty processes, and the shared model where it is not there yet."""
    count = spec.execution.trainer_ranks + spec.execution.rollout_engines
    store = spec.execution.object_store_mib
    with Cluster(name.replace(" ", "-"), num_cpus=count, object_store_mib=store) as cluster:
        started = Processes(cluster, spec, with_engines=with_engines)
        guard.look()
        if not Path(world.masters).is_dir():
            write = "tools.gpu.legs:write_model"
            arguments = (world.model, world.masters, world.base.model_dump_json())
            gather([started.trainers[0].run(write, *arguments)], what="random weights")
        yield started


def start_trainer(world: World, spec: RunSpec, handles: Sequence[EngineHandle]) -> TrainerGroup:
    """Make a trainer in these processes."""
    trainer = TrainerGroup(handles, spec)
    rendezvous = f"file://{world.folder}/rendezvous-{time.time_ns()}"
    trainer.start(spec, dcp_dir=world.masters, rendezvous=rendezvous)
    return trainer


def leave_groups() -> None:
    """Leave what a trainer that failed at its start has joined, so that the next one can start."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if "megatron" in sys.modules:
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()


def run_leg(
    world: World,
    spec: RunSpec,
    *,
    name: str,
    steps: int,
    after: Callable[[TrainerGroup, RolloutGroup], Mapping[str, Any]] | None = None,
) -> Leg:
    """Start trainer and engines in fresh processes and run some steps from the initial weights.

    `after` is called at the end; what it returns goes into the environment of the leg.
    """
    began = time.perf_counter()
    with processes(world, spec, name=name, with_engines=True) as started:
        created = create_engines(world, spec, started.engines)
        trainer = start_trainer(world, spec, started.trainers)
        gather(created, what="start of the engines", timeout_s=300)
        rollout = RolloutGroup(started.engines, spec)
        start_s = time.perf_counter() - began
        leg = run_steps(world, spec, trainer, rollout, steps=steps)
        leg.seconds["start"] = [start_s]
        leg.environment = {
            "placement": started.found(),
            "trainer": trainer.environment(),
            "rollout": rollout.environment(),
        }
        if after is not None:
            leg.environment["after"] = dict(after(trainer, rollout))
    return leg


def create_engines(world: World, spec: RunSpec, handles: Sequence[EngineHandle]) -> list[Any]:
    """Make a rollout engine in each of these processes; return what to wait for."""
    return [
        handle.actor.create.remote(
            "engines.rollout.vllm_engine:VllmEngine",
            world.model,
            spec.model_dump_json(),
            engine_index=index,
        )
        for index, handle in enumerate(handles)
    ]


def run_steps(
    world: World, spec: RunSpec, trainer: TrainerGroup, rollout: RolloutGroup, *, steps: int
) -> Leg:
    """Connect a fresh trainer with engines, and run some steps."""
    leg = Leg()
    trainer.connect(rollout, rendezvous=world.folder / f"weights-{time.time_ns()}")
    record_step(leg, [initial_push(trainer, rollout)])
    for step in range(1, steps + 1):
        drawn = draw(world, rollout, spec, step)
        leg.drawn.append(drawn)
        record_step(leg, train_step(trainer, rollout, spec, drawn, commit=_no_commit))
    return leg


def draw(world: World, rollout: RolloutGroup, spec: RunSpec, step: int) -> DrawnStep:
    """Draw a step's samples; the reward of each is a function of its tokens."""
    prompts = world.prompts(step)
    samples = rollout.generate(sample_requests(prompts, spec, step))
    rewards = tuple(reward(sample) for sample in samples)
    size = spec.sampling.samples_per_prompt
    groups = [rewards[first : first + size] for first in range(0, len(rewards), size)]
    advantages = group_advantages(groups, spec.loss, seed=0)
    return DrawnStep(
        step=step,
        prompts=prompts,
        samples=samples,
        rewards=rewards,
        advantages=advantages.values,
        groups_with_variance=advantages.groups_with_variance,
    )


def reward(sample: Sample) -> float:
    """Return a float32 value in [0, 1] that the tokens decide."""
    return round_to_float32((sum(sample.token_ids) % 7) / 6)


def replay(
    trainer: TrainerGroup,
    spec: RunSpec,
    drawn: Iterable[DrawnStep],
    *,
    save: Callable[[int], Path | None] = lambda step: None,
) -> Leg:
    """Train on rollouts that were drawn before, without engines.

    `save` returns where the checkpoint after a step goes, or None.
    """
    leg = Leg()
    for step in drawn:
        record_step(leg, train_step(trainer, None, spec, step, commit=_no_commit))
        path = save(step.step)
        if path is not None:
            leg.states[step.step] = trainer.save(
                path, chain_digest="0" * 32, attempt=1, run_folder=None
            )
    return leg


def record_step(leg: Leg, outcomes: Iterable[StepOutcome]) -> None:
    """Add the outcomes of a step to the leg.

    Raises:
        AssertionError: A required equality did not hold.
    """
    for outcome in outcomes:
        record: StepRecord = outcome.record
        assert not record.violations, record.violations
        leg.chain = extend_chain(leg.chain or CHAIN_START, roots_of(record.digests))
        leg.digests[f"{record.step}.{record.update}"] = record.digests
        for name, value in record.metrics.items():
            if name.startswith("perf/memory/"):
                leg.memory[name] = round(value, 1)
            elif name.startswith("perf/"):
                leg.seconds.setdefault(name.removeprefix("perf/"), []).append(value)
        if "train/grad_norm" in record.metrics:
            leg.norms.append(record.metrics["train/grad_norm"])
        if outcome.gate is not None:
            leg.gate = {
                "max_abs_diff": max(leg.gate.get("max_abs_diff", 0.0), outcome.gate.max_abs_diff),
                "exact": leg.gate.get("exact", 0) + outcome.gate.num_exact,
                "tokens": leg.gate.get("tokens", 0) + outcome.gate.num_tokens,
            }


def first_difference(a: Digests, b: Digests, *, ignoring: Sequence[str] = ()) -> str | None:
    """Return the first (step.update, probe, name) that differs, or None; both have the same steps.

    Raises:
        AssertionError: They have no step in common.
    """
    common = [key for key in a if key in b and not key.endswith(".-1")]
    assert common, f"no step in common: {sorted(a)} and {sorted(b)}"
    for key in common:
        for probe in PROBES:
            if probe in ignoring:
                continue
            left, right = a[key].get(probe, {}), b[key].get(probe, {})
            for name in sorted(left.keys() | right.keys()):
                if left.get(name) != right.get(name):
                    return f"{key} {probe} {name}"
    return None


def _no_commit(step: int, probe: str, root: str) -> None:
    """Nobody reads a ledger of these legs."""


def as_json(value: Any) -> str:
    """Return one line of JSON; what JSON does not know is written as text."""
    return json.dumps(value, default=str)
