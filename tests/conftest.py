"""What all tests share: how they are dealt to workers, and what needs a device.

Tests in `tests/gpu` are collected everywhere and need a device to run; without one each is reported
as skipped, with the reason, never left out of the summary.
"""

from __future__ import annotations

from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


SHARED_FIXTURES = ("runner", "lockstep")
"""Session fixtures that start engines: tests that use one go to one worker, where it starts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal tests to workers, and skip what is marked `gpu` where there is no device."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        shared = next((name for name in SHARED_FIXTURES if name in names), None)
        item.add_marker(pytest.mark.xdist_group(shared or item.path.name))
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
