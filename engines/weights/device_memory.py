"""Device memory that two processes map: is it possible, how is it exported, how is it opened.

CUDA's IPC handles exist for memory of `cudaMalloc` only. Memory of the driver's virtual memory
management has none: vLLM's sleep mode (`CuMemAllocator`), torch_memory_saver and torch's expandable
segments all allocate so. Exporting it fails late or maps the wrong bytes, so it is asked first.

    buffer = exportable(2**26)
    exported = export(buffer)          # in the sender, once for each receiver
    buffer = import_buffer(exported)   # in the receiver
"""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from engines.environment import gpu_uuid
from model_specs.errors import EngineError

_IS_LEGACY_IPC_CAPABLE = 10
"""`CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE` of the driver API."""
_DEVICE_ARGUMENT = 6
"""Where `rebuild_cuda_tensor` takes the index of the device, as this process counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A buffer as another process on its machine opens it."""

    gpu: str | None
    """UUID: an index means another GPU in another process."""
    rebuild: Any
    arguments: tuple[Any, ...]


def exportable(size: int) -> torch.Tensor:
    """Return `size` bytes (uint8 [size]) on the current GPU that another process can map.

    Raises:
        EngineError: The allocator took them from virtual memory management.
    """
    buffer = _allocated(size)
    if not _is_ipc_capable(buffer.data_ptr()):
        raise EngineError(
            f"the {buffer.nbytes} bytes for a weight push at {buffer.data_ptr():#x} were allocated "
            "through CUDA's virtual memory management (expandable segments, torch_memory_saver or "
            "a sleeping allocator), which has no IPC handle; take that allocator out of the "
            "trainer's process, or set execution.transport=host"
        )
    return buffer


def _allocated(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _is_ipc_capable(pointer: int) -> bool:
    driver = ctypes.CDLL("libcuda.so.1")
    found = ctypes.c_int(0)
    code = driver.cuPointerGetAttribute(
        ctypes.byref(found), ctypes.c_int(_IS_LEGACY_IPC_CAPABLE), ctypes.c_uint64(pointer)
    )
    if code:
        raise EngineError(
            f"cuPointerGetAttribute of {pointer:#x} returned {code}: this is no device memory"
        )
    return bool(found.value)


def export(buffer: torch.Tensor) -> bytes:
    """Return what one receiver opens the buffer by; torch counts exports, so make one for each.

    Bytes, because they pass through the driver, which has no torch to unpack them with.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(buffer)
    return pickle.dumps(Exported(gpu=gpu_uuid(), rebuild=rebuild, arguments=arguments))


def import_buffer(packed: bytes) -> torch.Tensor:
    """Map a buffer that the trainer of this run has exported.

    Raises:
        EngineError: It lies on another GPU than this process runs on.
    """
    exported: Exported = pickle.loads(packed)
    device = torch.device("cuda", torch.cuda.current_device())
    if gpu_uuid() != exported.gpu:
        raise EngineError(
            f"the trainer's buffer lies on GPU {exported.gpu}, this engine runs on "
            f"{gpu_uuid()}; execution.transport=cuda_ipc needs both on one"
        )
    arguments = list(exported.arguments)
    arguments[_DEVICE_ARGUMENT] = device.index
    buffer: torch.Tensor = exported.rebuild(*arguments)
    return buffer
