"""Laws of the time that is spent on evidence."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engines.provenance import evidence_time
from engines.provenance.digest import digest_array, digest_json
from engines.provenance.evidence_time import device_evidence, evidence, take_seconds

NAP_S = 0.02


@evidence
def _nap() -> None:
    time.sleep(NAP_S)


@evidence
def _nap_inside() -> None:
    _nap()


@evidence
def _nap_and_fail() -> None:
    time.sleep(NAP_S)
    raise ValueError("after the nap")


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    take_seconds()


def test_taking_the_seconds_starts_again_from_zero() -> None:
    _nap()
    assert take_seconds() >= NAP_S
    assert take_seconds() == 0.0


def test_a_call_inside_another_is_counted_once() -> None:
    started = time.perf_counter()
    _nap_inside()
    wall = time.perf_counter() - started
    assert NAP_S <= take_seconds() <= wall


def test_a_call_that_raises_is_counted_and_the_next_one_too() -> None:
    with pytest.raises(ValueError, match="after the nap"):
        _nap_and_fail()
    _nap()
    assert take_seconds() >= 2 * NAP_S


def test_work_that_is_no_evidence_is_not_counted() -> None:
    time.sleep(NAP_S)
    assert take_seconds() == 0.0


def test_digests_are_counted() -> None:
    digest_array("w", np.zeros((64, 64), dtype=np.float32))
    arrays = take_seconds()
    digest_json({"a": 1})
    assert arrays > 0.0
    assert take_seconds() > 0.0


@device_evidence
def _nap_on_device() -> None:
    time.sleep(NAP_S)


@evidence
def _nap_around_device() -> None:
    _nap_on_device()


def test_the_wait_for_a_device_is_not_counted_and_the_evidence_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def wait() -> None:
        time.sleep(10 * NAP_S)
        waits.append(NAP_S)

    monkeypatch.setattr(evidence_time, "_wait_for_device", wait)
    _nap_on_device()
    assert NAP_S <= take_seconds() < 8 * NAP_S
    _nap_around_device()  # counted from the outermost call on, which may not wait for a device
    assert len(waits) == 1
    assert take_seconds() >= NAP_S
