"""What all tests share: what needs a device.

Tests in `tests/gpu` are collected everywhere and need a device to run; without one each is reported
as skipped, with the reason, never left out of the summary.
"""

from __future__ import annotations

from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in `tests/gpu`, and skip what is marked `gpu` where there is no device."""
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # Torch takes seconds to import; only GPU tests need the answer.
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="not run: this machine has no CUDA device"))
