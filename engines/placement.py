"""Which GPU each process has: a function of the spec and of the cluster's GPUs in canonical order.

The order is node address, then PCI bus id: never the order in which processes happened to start. A
process sees its own GPU alone, by variables that are set before torch loads in it, and says
afterwards which one it really has. Imports no torch.

    gpus = cluster_gpus()                        # asked on every node
    placement = place(spec, gpus)                # "trainer-0" -> Gpu
    cluster.start("trainer-0", **start_on(placement.get("trainer-0"), trainer_env(spec)))
    require_placed(placement, {"trainer-0": "GPU-..."})
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.cluster import gather
from model_specs.errors import EngineError
from model_specs.run_spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Gpu:
    """One GPU; sorting gives the canonical order."""

    node: str
    """Address of its node."""
    pci_bus_id: str
    index: int
    """On its node, in the order of PCI bus ids."""
    uuid: str
    node_id: str = ""
    """Ray's id of the node."""


def nvidia_smi(query: str) -> list[list[str]]:
    """Return the rows that `nvidia-smi` answers to a query such as `--query-gpu=index,uuid`.

    Raises:
        EngineError: It is missing or fails.
    """
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(
            f"{' '.join(command)} failed ({error}), so it cannot be said which GPUs there are and "
            "who holds their memory; execution.device=cuda needs NVIDIA's driver and its nvidia-smi"
        ) from error
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]


def node_gpus() -> list[tuple[str, int, str]]:
    """Return (PCI bus id, index, UUID) of this machine's GPUs that `CUDA_VISIBLE_DEVICES` leaves.

    Raises:
        EngineError: `nvidia-smi` is missing or fails.
    """
    rows = nvidia_smi("--query-gpu=pci.bus_id,index,uuid")
    found = [(bus, int(index), uuid) for bus, index, uuid in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sorted(found)
    chosen = [name.strip() for name in visible.split(",")]
    return sorted(gpu for gpu in found if str(gpu[1]) in chosen or gpu[2] in chosen)


def cluster_gpus() -> list[Gpu]:
    """Return the GPUs of all nodes of the Ray cluster that this process has joined, in order."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Ray would hide the GPUs from a task that asks for none.
    env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    remote = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": env})(node_gpus)
    here = ray.get_runtime_context().get_node_id()
    gpus = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        found = (
            node_gpus()
            if node["NodeID"] == here
            else gather(
                [remote.options(scheduling_strategy=there).remote()],
                what=f"GPUs of node {node['NodeManagerAddress']}",
                timeout_s=120,
            )[0]
        )
        gpus += [
            Gpu(
                node=node["NodeManagerAddress"],
                pci_bus_id=bus,
                index=index,
                uuid=uuid,
                node_id=node["NodeID"],
            )
            for bus, index, uuid in found
        ]
    return sorted(gpus)


def trainer_name(rank: int) -> str:
    """Name of a trainer rank's process."""
    return f"trainer-{rank}"


def engine_name(index: int) -> str:
    """Name of a rollout engine's process."""
    return f"rollout-{index}"


def place(spec: RunSpec, gpus: Sequence[Gpu]) -> dict[str, Gpu]:
    """Return process name -> GPU; empty where the device is the CPU.

    Args:
        spec: Its `execution` says how many processes there are and whether they share.
        gpus: Of the cluster, in any order.

    Raises:
        EngineError: There are too few.
    """
    execution = spec.execution
    if execution.device == "cpu":
        return {}
    ordered = sorted(gpus)
    ranks, engines = execution.trainer_ranks, execution.rollout_engines
    is_shared = execution.placement == "colocated"
    needed = ranks if is_shared else ranks + engines
    if len(ordered) < needed:
        shared = "the engines share them" if is_shared else f"{engines} engines have their own"
        raise EngineError(
            f"{len(ordered)} GPUs are there and {needed} are needed: {ranks} trainer ranks have "
            f"one each (execution.trainer_ranks) and {shared} (execution.placement="
            f"{execution.placement}); start fewer, or set execution.placement=colocated"
        )
    first = 0 if is_shared else ranks
    chosen = {trainer_name(rank): ordered[rank] for rank in range(ranks)}
    for index in range(engines):
        chosen[engine_name(index)] = ordered[index % ranks if is_shared else first + index]
    return chosen


def start_on(gpu: Gpu | None, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `Cluster.start` that leave a process this GPU alone; on CPU only `env`.

    Args:
        gpu: None on CPU.
        env: What the process starts with besides.
    """
    if gpu is None:
        return {"env": dict(env)}
    chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu.index)}
    return {"env": {**env, **chosen}, "node_id": gpu.node_id}


def require_placed(placement: Mapping[str, Gpu], found: Mapping[str, str | None]) -> None:
    """Require that each process runs on the GPU that it was given.

    Args:
        placement: Process name -> GPU.
        found: Process name -> UUID that was read inside it.

    Raises:
        EngineError: One does not: Ray or a variable of the user's chose another.
    """
    wrong = [
        f"{name} has {found.get(name)}, not {gpu.uuid} ({gpu.node} {gpu.pci_bus_id})"
        for name, gpu in placement.items()
        if found.get(name) != gpu.uuid
    ]
    if wrong:
        raise EngineError(
            f"processes run on other GPUs than they were given: {'; '.join(wrong)}; something has "
            "changed CUDA_VISIBLE_DEVICES between the start of a process and torch"
        )
