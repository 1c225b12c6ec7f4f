"""Who holds memory of the GPUs, and whether it is as it was before anything was started here.

Invariant: a stage begins only where every process on a GPU is one of the leg's own engines or was
there before the first leg, and a leg only where the memory in use has come back to what it was
then. A process that has just been ended is waited for. Only GPUs that `CUDA_VISIBLE_DEVICES` leaves
count: the others are somebody else's. Reads `nvidia-smi`; loads nothing.

    baseline = Baseline()                        # before the first engine is started
    baseline.require_free(what="leg a")          # no engine of ours is there
    baseline.require_only({4711}, what="controls")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from engines.placement import node_gpus, nvidia_smi
from model_specs.errors import EngineError

SLACK_MIB = 256
"""Above the baseline: what the driver keeps for a moment."""
WAIT_S = 60.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory in use at one moment."""

    used_mib: tuple[int, ...]
    """A number for each GPU, in the order of PCI bus ids."""
    processes: Mapping[int, int]
    """Process id -> MiB, of all that hold memory of a GPU."""


def read_usage() -> Usage:
    """Ask `nvidia-smi`.

    Raises:
        EngineError: It is not there or does not answer.
    """
    ours = [uuid for _, _, uuid in node_gpus()]
    processes: dict[int, int] = {}
    for pid, used, uuid in nvidia_smi("--query-compute-apps=pid,used_memory,gpu_uuid"):
        if uuid in ours:
            processes[int(pid)] = processes.get(int(pid), 0) + _number(used)
    used_mib = {uuid: _number(used) for used, uuid in nvidia_smi("--query-gpu=memory.used,uuid")}
    return Usage(used_mib=tuple(used_mib[uuid] for uuid in ours), processes=processes)


def _number(cell: str) -> int:
    return int(cell) if cell.isdigit() else 0  # "[N/A]" inside some virtual machines


class Baseline:
    """The memory in use before anything was started here."""

    def __init__(self, read: Callable[[], Usage] = read_usage, *, wait_s: float = WAIT_S) -> None:
        self._read = read
        self._wait_s = wait_s
        self._before = read()

    def require_free(self, *, what: str) -> None:
        """Wait until no process of ours holds memory and each GPU is back at its baseline.

        Raises:
            EngineError: Still not after the wait; names the GPUs, what they hold and the processes.
        """
        self._wait(what, own=(), with_memory=True)

    def require_only(self, own: Collection[int], *, what: str) -> None:
        """Wait until none but `own` processes, and those of the baseline, hold memory.

        Raises:
            EngineError: Others still do after the wait; names them.
        """
        self._wait(what, own=own, with_memory=False)

    def _wait(self, what: str, *, own: Collection[int], with_memory: bool) -> None:
        deadline = time.monotonic() + self._wait_s
        while True:
            usage = self._read()
            wrong = self._faults(usage, own, with_memory)
            if not wrong:
                return
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"{what} cannot start: {'; '.join(wrong)} after {self._wait_s:g} s; end these "
                    "processes, or what they serve"
                )
            time.sleep(min(_POLL_S, self._wait_s))

    def _faults(self, usage: Usage, own: Collection[int], with_memory: bool) -> list[str]:
        strangers = {
            pid: mib
            for pid, mib in usage.processes.items()
            if pid not in own and pid not in self._before.processes
        }
        held = ", ".join(f"{pid} ({mib} MiB)" for pid, mib in sorted(strangers.items()))
        faults = [f"process {held} still holds GPU memory"] if strangers else []
        if with_memory:
            faults += [
                f"GPU {index} has {now} MiB in use, {before} MiB before the first leg (processes "
                f"now: {', '.join(map(str, sorted(usage.processes))) or 'none visible'})"
                for index, (before, now) in enumerate(
                    zip(self._before.used_mib, usage.used_mib, strict=True)
                )
                if now > before + SLACK_MIB
            ]
        return faults
