"""The independent checker agrees with a real run, and names the place of what was edited in it."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.provenance.digest import CHAIN_START
from engines.provenance.ledger import extend_chain, roots_of
from tests.unit.test_check_run import CHECKER, check

READ = ("ledger.jsonl", "spec.json", "environment.json", "samples.jsonl", "digests", "samples")

Edit = Callable[[Path], None]


@pytest.fixture
def copied(twin_folder: Path, tmp_path: Path) -> Path:
    """A copy of what the checker reads, with the tensors of one update."""
    for leg in ("a", "b"):
        target = tmp_path / "twin" / leg
        target.mkdir(parents=True)
        for name in READ:
            source = twin_folder / leg / name
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target / name)
        kept = Path("tensors", "step-000002-0")
        shutil.copytree(twin_folder / leg / kept, target / kept)
    shutil.copyfile(twin_folder / "verdict.json", tmp_path / "twin" / "verdict.json")
    return tmp_path / "twin"


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_lines(path: Path, number: int, change: Callable[[Any], None]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    row = json.loads(lines[number])
    change(row)
    path.write_text("\n".join([*lines[:number], json.dumps(row), *lines[number + 1 :]]) + "\n")


def change_value(probe: str) -> Edit:
    """Another float32 for the first sample of step 2 in leg b."""

    def edit(folder: Path) -> None:
        def change(values: Any) -> None:
            row = next(iter(values[probe].values()))
            row[0] = (float.fromhex(row[0]) + 0.5).hex()

        edit_json(folder / "b" / "samples" / "step-000002.json", change)

    return edit


def change_completion(folder: Path) -> None:
    def change(row: Any) -> None:
        row["completion"] = "0" if row["reward"] < 0.5 else "x"

    edit_lines(folder / "a" / "samples.jsonl", 40, change)


def change_metric(folder: Path) -> None:
    def change(row: Any) -> None:
        row["metrics"]["gate/logprob_abs_diff/max"] = (2.0**-20).hex()

    edit_lines(folder / "a" / "ledger.jsonl", 3, change)


def change_chain(folder: Path) -> None:
    def change(row: Any) -> None:
        row["chain"] = "0" * 32

    edit_lines(folder / "a" / "ledger.jsonl", 3, change)


def change_commitment(folder: Path) -> None:
    def change(row: Any) -> None:
        row["root"] = "0" * 32

    edit_lines(folder / "a" / "ledger.jsonl", 2, change)


def change_spec(folder: Path) -> None:
    def change(spec: Any) -> None:
        spec["loss"]["advantage_eps"] = 0.125

    edit_json(folder / "a" / "spec.json", change)


def change_digest(folder: Path) -> None:
    def change(digests: Any) -> None:
        digests["weights"]["model.norm.weight"] = "0" * 32

    edit_json(folder / "a" / "digests" / "step-000001-0.json", change)


def change_tensor(folder: Path) -> None:
    path = folder / "b" / "tensors" / "step-000002-0" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def keep_lines(number: int) -> Edit:
    """Leave leg b the first lines of its ledger alone."""

    def edit(folder: Path) -> None:
        path = folder / "b" / "ledger.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:number]), encoding="utf-8")

    return edit


def without_verdict(edit: Edit) -> Edit:
    """The same where no verdict says how the legs ended."""

    def both(folder: Path) -> None:
        (folder / "verdict.json").unlink()
        edit(folder)

    return both


def drop_row(folder: Path) -> None:
    path = folder / "a" / "samples.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:40] + lines[41:]), encoding="utf-8")


def drop_probes(*probes: str) -> Edit:
    """Take probes out of line 0 of leg b, in a ledger that is whole in itself."""

    def edit(folder: Path) -> None:
        edit_json(
            folder / "b" / "digests" / "step-000000--1.json",
            lambda digests: [digests.pop(probe) for probe in probes],
        )
        written_again(folder / "b")

    return edit


def drop_advantages(folder: Path) -> None:
    """Leg a trains on no sample of step 2: nothing to derive, and nothing to agree with."""
    for name in ("digests/step-000002-0.json", "samples/step-000002.json"):
        edit_json(folder / "a" / name, lambda probes: probes["advantages"].clear())
    written_again(folder / "a")


EDITS: dict[str, tuple[Edit, str]] = {
    "one reward": (change_value("rewards"), "WRONG sample digests at b step 2 update 0 rewards"),
    "one log-prob": (
        change_value("train_logprobs"),
        "WRONG sample digests at b step 2 update 0 train_logprobs 2/",
    ),
    "one completion": (change_completion, "WRONG rewards at a step 2 update 0 2/"),
    "the gate's figure": (
        change_metric,
        "WRONG gate figures at a step 1 update 0 gate/logprob_abs_diff/max",
    ),
    "one chain line": (change_chain, "WRONG chain at a step 1 update 0"),
    "one commitment": (change_commitment, "WRONG blind commitments at a step 1 update 0"),
    "the formula of advantages": (change_spec, "WRONG advantages at a step 1 update 0 1/"),
    "one digest": (change_digest, "WRONG roots at a step 1 update 0 weights"),
    "the samples' table": (
        lambda folder: (folder / "a" / "samples.jsonl").write_text(""),
        "WRONG names at a step 1 update 0 samples.jsonl",
    ),
    "one row of it": (drop_row, "WRONG names at a step 2 update 0 samples.jsonl"),
    "a ledger without its last step": (keep_lines(-2), "WRONG ends at b"),
    "a ledger with its header alone": (keep_lines(1), "WRONG ends at b"),
    "the same without a verdict": (
        without_verdict(keep_lines(-2)),
        "WRONG ends at b: recorded 8, derived 7",
    ),
    "a leg": (
        lambda folder: shutil.rmtree(folder / "b"),
        "WRONG ledgers at {folder}: recorded ['b'], derived []",
    ),
    "what was received": (drop_probes("received"), "WRONG probes at b step 0 update -1"),
    "all of a push": (drop_probes("sent", "received"), "WRONG probes at b step 0 update -1"),
    "all advantages": (drop_advantages, "WRONG advantages at a step 2 update 0 2/"),
    "one kept tensor": (change_tensor, "WRONG kept tensors at b step 2 update 0 weights "),
}


@pytest.mark.slow
def test_a_real_twin_agrees_in_everything_that_is_derived(copied: Path) -> None:
    done = check(copied)
    assert done.returncode == 0, done.stderr
    counts = {
        what: int(number)
        for number, what in (
            part.split(" ", 1)
            for part in done.stdout.strip().removeprefix("all agree: ").split(", ")
        )
    }
    assert counts["rewards"] == counts["advantages"] == 2 * 8 * 32
    assert counts["chain"] == 2 * 9
    assert counts["gate figures"] == 2 * 2 * 8
    assert counts["legs"] == 3 + 8 * 13
    assert (counts["ends"], counts["probes"]) == (2, 2 * 9)
    assert counts["kept tensors"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_named_with_its_place(copied: Path, name: str) -> None:
    edit, message = EDITS[name]
    edit(copied)
    done = check(copied)
    wanted = message.format(folder=copied)
    assert (done.returncode, done.stderr.startswith(wanted)) == (1, True), done.stderr


@pytest.mark.slow
def test_one_leg_is_said_to_be_one(copied: Path) -> None:
    without_verdict(lambda folder: shutil.rmtree(folder / "b"))(copied)
    done = check(copied)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("; one leg: equality not checked\n")


def with_other_weights(leg: Path) -> None:
    """Another digest in line 0, and a ledger that is whole in itself."""
    edit_json(
        leg / "digests" / "step-000000--1.json",
        lambda digests: digests["weights"].update({"model.norm.weight": "0" * 32}),
    )
    written_again(leg)


def written_again(leg: Path) -> None:
    """The ledger as its digests say, and a verdict that knows its end."""
    header, *lines = (leg / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    chain, rows = CHAIN_START, []
    for row in map(json.loads, lines):
        if row["kind"] == "update":
            name = f"step-{row['step']:06d}-{row['update']}.json"
            row["roots"] = roots_of(json.loads((leg / "digests" / name).read_bytes()))
            row["chain"] = chain = extend_chain(chain, row["roots"])
        rows.append(json.dumps(row))
    (leg / "ledger.jsonl").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    edit_json(
        leg.parent / "verdict.json",
        lambda verdict: verdict["legs"][leg.name].update(chain_digest=chain),
    )


@pytest.mark.slow
def test_two_legs_that_differ_are_named_with_the_probe(copied: Path) -> None:
    with_other_weights(copied / "b")
    done = check(copied)
    assert done.stderr.startswith("WRONG legs at b step 0 update -1 weights"), done.stderr


@pytest.mark.slow
def test_a_folder_without_a_step_is_not_called_right(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 1
    assert "nothing was checked" in done.stderr


def test_it_is_short_and_imports_nothing_of_the_project() -> None:
    source = CHECKER.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    imported = {
        (node.module or "").partition(".")[0] if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy", "blake3", "safetensors"}
