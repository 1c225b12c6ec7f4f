"""Laws of the ledger: order, the blind commitment, torn lines, truncation, verification."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from engines.contracts import PROBES, StepRecord
from engines.provenance.digest import CHAIN_START, digest_floats, digest_tokens, root_digest
from engines.provenance.fence import RunFolder
from engines.provenance.ledger import (
    LedgerHeader,
    LedgerWriter,
    extend_chain,
    read_ledger,
    roots_of,
    verify_ledger,
)
from engines.provenance.side_files import decode_value, encode_value, read_digests, read_values
from model_specs.errors import ArtifactError, EngineError, StaleAttemptError

HEADER = LedgerHeader(trajectory="t", plan="p", run_id="r", leg="a")


def line_zero() -> StepRecord:
    weights = {"w": "0" * 32}
    return StepRecord(step=0, update=-1, digests={"weights": weights, "sent": weights})


def values_of(step: int) -> dict[str, dict[str, list]]:
    return {
        "tokens": {"s0": [step, 7], "s1": []},
        "rollout_logprobs": {"s0": [-0.5, -0.0], "s1": []},
        "train_logprobs": {"s0": [-0.5, -0.25], "s1": []},
    }


def digests_of(step: int) -> dict[str, dict[str, str]]:
    values = values_of(step)
    digests = {
        probe: {
            name: (digest_tokens if probe == "tokens" else digest_floats)(name, row)
            for name, row in rows.items()
        }
        for probe, rows in values.items()
    }
    return digests | {"grads": {"w": f"{step:032x}"}, "weights": {"w": f"{step + 100:032x}"}}


def record(step: int, **changes: object) -> StepRecord:
    facts = {"digests": digests_of(step), "metrics": {"reward/mean": 0.1, "train/x": math.inf}}
    return StepRecord(step=step, update=0, **(facts | changes))  # type: ignore[arg-type]


def write_step(ledger: LedgerWriter, step: int) -> None:
    ledger.commit(step, "train_logprobs", root_digest(digests_of(step)["train_logprobs"]))
    ledger.append(record(step), values_of(step))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ledger = LedgerWriter(tmp_path / "a", header=HEADER)
    ledger.append(line_zero())
    for step in (1, 2, 3):
        write_step(ledger, step)
    return tmp_path / "a"


def edit_line(folder: Path, number: int, **changes: object) -> None:
    path = folder / "ledger.jsonl"
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes)
    path.write_text("\n".join(lines) + "\n")


def test_what_is_written_is_read_back_and_verifies(folder: Path) -> None:
    ledger = verify_ledger(folder)
    assert ledger.header == HEADER
    assert [line.key for line in ledger.lines] == [(0, -1), (1, 0), (2, 0), (3, 0)]
    assert ledger.lines[1].metrics == {"reward/mean": 0.1, "train/x": math.inf}
    assert ledger.lines[1].counts["tokens"] == 2
    assert list(ledger.lines[1].roots) == [probe for probe in PROBES if probe in digests_of(1)]
    assert read_digests(folder, 2, 0) == digests_of(2)
    assert read_values(folder, 2, 0) == values_of(2)
    assert math.copysign(1, read_values(folder, 2, 0)["rollout_logprobs"]["s0"][1]) == -1


def test_the_chain_is_over_all_roots_in_causal_order(folder: Path) -> None:
    ledger = read_ledger(folder)
    chain = CHAIN_START
    for line in ledger.lines:
        chain = extend_chain(chain, dict(reversed(line.roots.items())))
        assert line.chain == chain
    changed = roots_of(digests_of(3) | {"grads": {"w": "f" * 32}})
    assert extend_chain(ledger.lines[2].chain, changed) != ledger.chain


@pytest.mark.parametrize(
    "value",
    [0.1, -0.0, math.inf, -math.inf, 7, struct.unpack(">d", b"\xff\xf8" + b"\0\0\1\2\3\4")[0]],
)
def test_values_keep_their_bits(value: float | int) -> None:
    decoded = decode_value(json.loads(json.dumps(encode_value(value))))
    assert type(decoded) is type(value)
    assert struct.pack("d", decoded) == struct.pack("d", value)


def test_log_probs_other_than_the_committed_ones_are_refused(tmp_path: Path) -> None:
    ledger = LedgerWriter(tmp_path, header=HEADER)
    ledger.append(line_zero())
    with pytest.raises(EngineError, match="was committed as None"):
        ledger.append(record(1))
    ledger.commit(1, "train_logprobs", "c" * 32)
    with pytest.raises(EngineError, match=f"committed as {'c' * 32} .* but the update has"):
        ledger.append(record(1))
    without = {probe: rows for probe, rows in digests_of(1).items() if probe != "train_logprobs"}
    with pytest.raises(EngineError, match="but the update has None"):
        ledger.append(record(1, digests=without))
    with pytest.raises(EngineError, match="is committed already"):
        ledger.commit(1, "train_logprobs", root_digest(digests_of(1)["train_logprobs"]))
    assert ledger.num_lines == 1


def test_updates_and_commitments_out_of_order_are_refused(folder: Path) -> None:
    ledger = LedgerWriter(folder, header=HEADER)
    for step, update in ((3, 0), (5, 0), (4, 1), (3, 2), (0, -1)):
        with pytest.raises(EngineError, match=r"after \(3, 0\); allowed is \(3, 1\) or \(4, 0\)"):
            ledger.append(StepRecord(step=step, update=update, digests={}))
    with pytest.raises(EngineError, match="next step is 4"):
        ledger.commit(3, "train_logprobs", "c" * 32)
    empty = LedgerWriter(folder.parent / "b", header=HEADER)
    with pytest.raises(EngineError, match=r"allowed is \(0, -1\)"):
        empty.append(StepRecord(step=1, update=0, digests={}))
    with pytest.raises(EngineError, match="unknown probe 'gradients'"):
        ledger.append(StepRecord(step=3, update=1, digests={"gradients": {}}))
    assert read_ledger(folder).last_step == 3


def test_several_updates_of_a_step_keep_their_own_values(folder: Path) -> None:
    ledger = LedgerWriter(folder, header=HEADER)
    digests = {"loss": {"loss": digest_floats("loss", [0.5])}}
    ledger.append(StepRecord(step=3, update=1, digests=digests), {"loss": {"loss": [0.5]}})
    assert read_values(folder, 3, 0) == values_of(3)
    assert read_values(folder, 3, 1) == {"loss": {"loss": [0.5]}}
    assert verify_ledger(folder).lines[-1].key == (3, 1)
    assert ledger.last_digests("loss") == digests["loss"]
    assert ledger.last_digests("weights") == digests_of(3)["weights"]
    with pytest.raises(ArtifactError, match="no update has the probe received"):
        ledger.last_digests("received")


def test_a_torn_last_line_is_dropped_with_a_note_and_the_ledger_goes_on(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    seen = read_ledger(folder)
    assert seen.last_step == 2
    assert "torn" in seen.notes[0]
    ledger = LedgerWriter(folder, header=HEADER)
    assert "torn" in ledger.notes[0]
    ledger.append(record(3), values_of(3))
    assert path.read_bytes() == whole
    verify_ledger(folder)


def test_a_damaged_line_in_the_middle_is_an_error_naming_it(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], lines[3][:-9], *lines[4:]]))
    with pytest.raises(ArtifactError, match="line 4 is damaged"):
        read_ledger(folder)


def test_an_unknown_schema_version_is_refused_with_both(folder: Path) -> None:
    edit_line(folder, 1, schema_version=2)
    with pytest.raises(ArtifactError, match=r"schema version 2; this version of Lockstep reads 1"):
        read_ledger(folder)


def test_a_ledger_of_another_identity_is_refused_and_of_another_plan_is_not(folder: Path) -> None:
    for name in ("trajectory", "run_id", "leg"):
        facts = {"trajectory": "t", "plan": "p", "run_id": "r", "leg": "a"} | {name: "other"}
        with pytest.raises(ArtifactError, match=f"belongs to {name} .* not 'other'"):
            LedgerWriter(folder, header=LedgerHeader(**facts))
    longer = LedgerWriter(
        folder, header=LedgerHeader(trajectory="t", plan="longer", run_id="r", leg="a")
    )
    assert longer.last_step == 3


def test_truncation_drops_later_lines_and_their_side_files(folder: Path) -> None:
    reference = LedgerWriter(folder, header=HEADER).lines
    (folder / "tensors" / "step-000003-0").mkdir(parents=True)
    ledger = LedgerWriter(folder, header=HEADER)
    ledger.commit(4, "train_logprobs", "c" * 32)
    ledger.truncate_after(2)
    assert [path.name for path in sorted((folder / "digests").iterdir())] == [
        "step-000000--1.json",
        "step-000001-0.json",
        "step-000002-0.json",
    ]
    assert not (folder / "samples" / "step-000003.json").exists()
    assert not (folder / "tensors" / "step-000003-0").exists()
    assert verify_ledger(folder).last_step == 2
    write_step(ledger, 3)
    assert LedgerWriter(folder, header=HEADER).lines == reference
    with pytest.raises(ArtifactError, match="ends at step 3, before the checkpoint's step 9"):
        ledger.truncate_after(9)


def test_a_stale_attempt_writes_nothing(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, run_id="r")
    ledger = LedgerWriter(tmp_path / "a", header=HEADER, fence=run.new_attempt())
    ledger.append(line_zero())
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    run.new_attempt()
    with pytest.raises(StaleAttemptError, match="attempt 1"):
        ledger.commit(1, "train_logprobs", "c" * 32)
    with pytest.raises(StaleAttemptError):
        ledger.truncate_after(0)
    with pytest.raises(StaleAttemptError):
        ledger.append(StepRecord(step=1, update=0, digests={}))
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert ledger.last_step == 0


def test_verification_names_a_forged_root_chain_digest_value_and_commitment(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    intact = path.read_bytes()
    roots = json.loads(intact.split(b"\n")[3])["roots"]

    edit_line(folder, 4, roots=roots | {"grads": "0" * 32})
    with pytest.raises(
        ArtifactError, match=f"step 1 update 0: root of grads is recorded as {'0' * 32}"
    ):
        verify_ledger(folder)
    path.write_bytes(intact)
    edit_line(folder, 4, chain="0" * 32)
    with pytest.raises(
        ArtifactError, match=f"step 1 update 0: the chain is recorded as {'0' * 32}"
    ):
        verify_ledger(folder)
    path.write_bytes(intact)
    edit_line(folder, 3, root="0" * 32)
    with pytest.raises(ArtifactError, match=f"step 1 update 0: .*committed as {'0' * 32}"):
        verify_ledger(folder)
    path.write_bytes(intact)
    verify_ledger(folder)

    values = folder / "samples" / "step-000002.json"
    text = values.read_text()
    values.write_text(text.replace("[2,7]", "[2,8]"))
    with pytest.raises(ArtifactError, match="step 2 update 0: tokens of s0 is recorded as"):
        verify_ledger(folder)
    values.write_text(text)
    side = folder / "digests" / "step-000002-0.json"
    content = json.loads(side.read_text())
    content["weights"]["w"] = "e" * 32
    side.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="step 2 update 0: root of weights is recorded"):
        verify_ledger(folder)
    side.unlink()
    with pytest.raises(ArtifactError, match=r"step 2 update 0: the digests .* are missing"):
        verify_ledger(folder)


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has no ledger\.jsonl"):
        read_ledger(tmp_path)
    (tmp_path / "ledger.jsonl").write_bytes(b'{"kind":"hea')
    with pytest.raises(ArtifactError, match="has no header"):
        read_ledger(tmp_path)
