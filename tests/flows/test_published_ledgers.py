"""The demo gives the bits that were published for this environment, where any were."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.provenance.verdict import Verdict
from tools import goldens

pytestmark = pytest.mark.slow


def test_the_demo_is_the_published_golden_of_this_environment(twin_folder: Path) -> None:
    found = goldens.check(twin_folder)
    if found.verdict is None:
        pytest.skip(f"not run: {found.message}")
    assert found.verdict is Verdict.IDENTICAL, found.message
