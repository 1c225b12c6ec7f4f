"""A new user's whole way, with the wheel in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance import new_user


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_new_user_gets_from_a_wheel_to_a_compared_run(tmp_path: Path) -> None:
    new_user.main(tmp_path / "work", from_scratch=False)
