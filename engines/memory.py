"""Memory in use, as the device or, for a process that uses none, the process reports it.

mib = process_memory(release=True)
"""

from __future__ import annotations

import gc
import os

import torch


def process_memory(*, release: bool = False) -> float:
    """Return MiB in use: of the whole GPU where this process uses one, else its resident memory.

    Args:
        release: Give unused cached blocks of a GPU back first: what was freed must not count.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        if release:
            gc.collect()
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
