"""Laws of the comparison: verdict, first difference down to the element, distance in ULP."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engines.contracts import PROBES, StepRecord
from engines.faults import flip_bit, flip_float32
from engines.provenance.descent import natural_order
from engines.provenance.diff import Comparison, compare_ledgers
from engines.provenance.digest import digest_floats, digest_tokens, root_digest
from engines.provenance.element_diff import (
    diff_elements,
    elements_of,
    load_tensor,
    ulp_distance,
)
from engines.provenance.ledger import LedgerHeader, LedgerWriter
from engines.provenance.side_files import tensors_path
from engines.provenance.tensor_digest import digest_tensors
from engines.provenance.verdict import Verdict
from model_specs.errors import ArtifactError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

SAMPLE_PROBES = PROBES[:6]
TENSOR_PROBES = PROBES[6:]
NUM_STEPS = 3
Change = Callable[[int, dict[str, Any], dict[str, Any]], None]
"""(step, probe -> name -> values, probe -> name -> tensor), changed in place."""


def write_leg(
    folder: Path,
    *,
    change: Change | None = None,
    keep: bool = True,
    num_steps: int = NUM_STEPS,
    trajectory: str = "t",
) -> Path:
    ledger = LedgerWriter(
        folder, header=LedgerHeader(trajectory=trajectory, plan="p", run_id="r", leg=folder.name)
    )
    for step in range(num_steps + 1):
        values: dict[str, Any] = {}
        if step:
            values = {
                probe: {f"{step}/p{i}/0": [3, 5 + i] for i in (2, 10)}
                for probe in ("prompts", "tokens")
            }
            values |= {
                probe: {f"{step}/p{i}/0": [-0.5, 0.25 * i] for i in (2, 10)}
                for probe in SAMPLE_PROBES[2:]
            }
        probes = TENSOR_PROBES if step else ("weights", "sent", "received")
        tensors = {
            probe: {
                "layers.2.w": torch.full((2, 3), 1.0 + step),
                "layers.10.w": torch.ones(4, dtype=torch.bfloat16),
            }
            for probe in probes
        }
        if change is not None:
            change(step, values, tensors)
        digests = {
            probe: {
                name: (digest_tokens if probe in ("prompts", "tokens") else digest_floats)(
                    name, row
                )
                for name, row in rows.items()
            }
            for probe, rows in values.items()
        } | {probe: digest_tensors(rows) for probe, rows in tensors.items()}
        if "train_logprobs" in digests:
            ledger.commit(step, "train_logprobs", root_digest(digests["train_logprobs"]))
        update = 0 if step else -1
        ledger.append(StepRecord(step=step, update=update, digests=digests), values)
        for probe, rows in tensors.items() if keep else ():
            path = tensors_path(folder, step, update, probe)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(rows, path)
    return folder


def flip_tensor(probe: str, name: str, element: int, bit: int, *, step: int = 2) -> Change:
    def change(at: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if at == step:
            flip_bit(tensors[probe][name], element, bit)

    return change


def test_equal_ledgers_are_identical_with_their_chain(tmp_path: Path) -> None:
    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b")
    found = compare_ledgers(a, b, verify=True)
    assert found.verdict is Verdict.IDENTICAL
    assert found.first is None
    assert found.common_steps == 3
    assert (found.compared.updates, found.compared.probes) == (4, 3 + 3 * 13)
    assert found.compared.tensors == 2 * (3 + 3 * 13)
    assert found.chain_digest in found.headline
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == "Identical"


@pytest.mark.parametrize("probe", TENSOR_PROBES)
def test_a_flip_is_found_at_its_tensor_probe_with_element_and_distance(
    tmp_path: Path, probe: str
) -> None:
    a = write_leg(tmp_path / "a")

    def change(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 2:
            flip_bit(tensors[probe]["layers.2.w"], 4, 1)
        if step == 3:  # later differences are consequences
            flip_bit(tensors["grads"]["layers.2.w"], 0, 30)

    found = compare_ledgers(a, write_leg(tmp_path / "b", change=change))
    first = found.first
    assert found.verdict is Verdict.DIVERGED
    assert first is not None
    assert (first.step, first.update, first.probe, first.name) == (2, 0, probe, "layers.2.w")
    assert first.element == (1, 1)
    assert (first.value_a, first.value_b) == (
        3.0,
        float(np.float32(3) + 2 * np.spacing(np.float32(3))),
    )
    assert (first.hex_a, first.hex_b) == ("0x40400000", "0x40400002")
    assert (first.ulp, first.max_ulp, first.num_differing, first.num_elements) == (2, 2, 1, 6)
    assert found.compared.updates == 2
    assert f"step 2 update 0 {probe} layers.2.w[1, 1]: 3.0 (0x40400000)" in found.headline


@pytest.mark.parametrize("probe", SAMPLE_PROBES)
def test_a_flip_is_found_at_its_sample_probe_with_position_and_values(
    tmp_path: Path, probe: str
) -> None:
    is_tokens = probe in ("prompts", "tokens")

    def change(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 2:
            row = values[probe]["2/p10/0"]
            row[1] = 99 if is_tokens else flip_float32(row[1], 0)
            flip_bit(tensors["weights"]["layers.2.w"], 0, 0)

    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b", change=change)
    first = compare_ledgers(a, b, verify=True).first
    assert first is not None
    assert (first.step, first.probe, first.name, first.element) == (2, probe, "2/p10/0", (1,))
    if is_tokens:
        assert (first.value_a, first.value_b, first.ulp) == (15, 99, None)
        assert "first differing token" in first.detail
    else:
        assert (first.value_a, first.value_b, first.ulp) == (2.5, 2.500000238418579, 1)


def test_bfloat16_is_decoded_and_the_natural_first_name_is_reported(tmp_path: Path) -> None:
    def change(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 1:
            flip_bit(tensors["sent"]["layers.10.w"], 3, 0)

    a = write_leg(tmp_path / "a")
    first = compare_ledgers(a, write_leg(tmp_path / "b", change=change)).first
    assert first is not None
    assert (first.name, first.element, first.ulp) == ("layers.10.w", (3,), 1)
    assert (first.value_a, first.value_b, first.hex_b) == (1.0, 1.0078125, "0x3f81")

    def change_both(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        change(step, values, tensors)
        if step == 1:
            flip_bit(tensors["sent"]["layers.2.w"], 0, 0)

    both = compare_ledgers(a, write_leg(tmp_path / "c", change=change_both)).first
    assert both is not None
    assert both.name == "layers.2.w"
    assert "2 of 2 names differ" in both.detail
    assert sorted(["x.10", "x.2", "x\u00b2"], key=natural_order) == ["x.2", "x.10", "x\u00b2"]


def test_without_kept_tensors_the_report_says_what_to_set(tmp_path: Path) -> None:
    a = write_leg(tmp_path / "a", keep=False)
    b = write_leg(tmp_path / "b", keep=False, change=flip_tensor("grads", "layers.2.w", 0, 0))
    first = compare_ledgers(a, b).first
    assert first is not None
    assert (first.probe, first.name, first.element) == ("grads", "layers.2.w", None)
    assert "--set plan.keep_tensor_steps=2" in str(first)


def test_missing_names_probes_shapes_and_lengths_are_differences(tmp_path: Path) -> None:
    a = write_leg(tmp_path / "a")

    def without_name(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 1:
            del tensors["grads"]["layers.2.w"]

    def without_probe(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 1:
            del tensors["grads"]

    def other_shape(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 1:
            tensors["grads"]["layers.2.w"] = tensors["grads"]["layers.2.w"].reshape(3, 2)

    def longer(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 1:
            values["tokens"]["1/p2/0"] = [3, 7, 8]

    expected = {
        without_name: "only a has this name",
        without_probe: "only a has this probe",
        other_shape: "float32 of shape (2, 3) | float32 of shape (3, 2)",
        longer: "lengths 2 | 3; equal as far as both go",
    }
    for number, (change, text) in enumerate(expected.items()):
        found = compare_ledgers(a, write_leg(tmp_path / str(number), change=change))
        assert found.verdict is Verdict.DIVERGED
        assert text in str(found.first)


def test_a_longer_run_is_compared_on_the_common_prefix(tmp_path: Path) -> None:
    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b", num_steps=5)
    found = compare_ledgers(a, b)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 3)
    assert "4 and 6 updates: compared on the 4 in common" in found.headline


def test_nothing_in_common_is_vacuous_unless_the_start_differs(tmp_path: Path) -> None:
    a, b = write_leg(tmp_path / "a", num_steps=0), write_leg(tmp_path / "b")
    assert compare_ledgers(a, b).verdict is Verdict.VACUOUS
    empty = tmp_path / "empty"
    LedgerWriter(empty, header=LedgerHeader(trajectory="t", plan="p", run_id="r", leg="e"))
    assert compare_ledgers(empty, b).verdict is Verdict.VACUOUS
    other = write_leg(
        tmp_path / "c", num_steps=0, change=flip_tensor("weights", "layers.2.w", 0, 0, step=0)
    )
    found = compare_ledgers(other, b)
    assert found.verdict is Verdict.DIVERGED
    assert found.first is not None
    assert (found.first.step, found.first.update, found.first.probe) == (0, -1, "weights")


def changed_spec(**changes: Any) -> tuple[RunSpec, RunSpec]:
    spec = load_recipe("tiny_cpu")
    values = spec.model_dump(mode="json")
    for name, value in changes.items():
        group, _, field = name.partition("__")
        values[group][field] = value
    return spec, RunSpec.model_validate(values)


def test_other_trajectories_are_incomparable_unless_declared(tmp_path: Path) -> None:
    spec, other = changed_spec(optimizer__lr=0.125, seeds__root=7)
    a = write_leg(tmp_path / "r1" / "a", trajectory=trajectory_fingerprint(spec))
    b = write_leg(
        tmp_path / "r2" / "a",
        trajectory=trajectory_fingerprint(other),
        change=flip_tensor("grads", "layers.2.w", 0, 0),
    )
    for folder, each in ((a, spec), (b, other)):
        (folder.parent / "spec.json").write_text(each.model_dump_json())
    found = compare_ledgers(a, b)
    assert found.verdict is Verdict.INCOMPARABLE
    assert [field for field, _, _ in found.identity_differences] == ["optimizer.lr", "seeds.root"]
    assert found.identity_differences[1][1:] == (spec.seeds.root, 7)
    assert "optimizer.lr, seeds.root" in found.headline
    assert compare_ledgers(a, b, across=("optimizer.lr",)).verdict is Verdict.INCOMPARABLE
    declared = compare_ledgers(a, b, across=("optimizer", "seeds.root"))
    assert declared.verdict is Verdict.DIVERGED
    assert declared.first is not None
    assert declared.first.probe == "grads"
    assert "declared differences: optimizer.lr, seeds.root" in declared.note
    with pytest.raises(SpecError, match=r"'optimiser.lr' is no identity field"):
        compare_ledgers(a, b, across=("optimiser.lr",))


def test_without_specs_other_trajectories_show_their_fingerprints(tmp_path: Path) -> None:
    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b", trajectory="u")
    found = compare_ledgers(a, b)
    assert found.verdict is Verdict.INCOMPARABLE
    assert found.identity_differences == (("trajectory", "t", "u"),)
    spec, _ = changed_spec()
    given_specs = compare_ledgers(a, b, spec_a=spec, spec_b=spec.model_dump(mode="json"))
    assert given_specs.identity_differences == (("trajectory", "t", "u"),)
    refusal = Comparison.incomparable("a cached stage")
    assert (refusal.verdict, refusal.headline) == (Verdict.INCOMPARABLE, "a cached stage")


def test_environments_are_suspects_and_never_change_the_verdict(tmp_path: Path) -> None:
    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b")
    facts = {"trainer": {"versions": {"torch": "1"}, "ambient": {"pid": 1}}, "fingerprint": "x"}
    (a / "environment.json").write_text(json.dumps(facts))
    facts = {"trainer": {"versions": {"torch": "2"}, "ambient": {"pid": 2}, "new": True}}
    (b / "environment.json").write_text(json.dumps(facts))
    found = compare_ledgers(a, b)
    assert found.verdict is Verdict.IDENTICAL
    assert found.environment_differences == (
        ("trainer.new", "<absent>", True),
        ("trainer.versions.torch", "1", "2"),
    )


def test_side_files_that_do_not_belong_are_caught_by_verify(tmp_path: Path) -> None:
    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b")
    side = b / "digests" / "step-000002-0.json"
    content = json.loads(side.read_text())
    content["grads"]["layers.2.w"] = "0" * 32
    side.write_text(json.dumps(content))
    assert compare_ledgers(a, b).verdict is Verdict.IDENTICAL
    with pytest.raises(ArtifactError, match="step 2 update 0: root of grads"):
        compare_ledgers(a, b, verify=True)


def test_roots_or_chains_that_contradict_their_evidence_are_errors(tmp_path: Path) -> None:
    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b")
    path = b / "ledger.jsonl"
    intact = path.read_text().splitlines()
    line = json.loads(intact[4])
    assert (line["step"], line["kind"]) == (2, "commit")
    line = json.loads(intact[5])
    forged = {"roots": line["roots"] | {"grads": "0" * 32}}
    path.write_text("\n".join([*intact[:5], json.dumps(line | forged), *intact[6:]]) + "\n")
    with pytest.raises(ArtifactError, match="the roots of grads differ but the digests"):
        compare_ledgers(a, b)
    path.write_text("\n".join([*intact[:5], json.dumps(line | {"chain": "0"}), *intact[6:]]) + "\n")
    with pytest.raises(ArtifactError, match="all roots are equal but the chains"):
        compare_ledgers(a, b)


def test_kept_tensors_that_are_not_what_was_digested_are_said_so(tmp_path: Path) -> None:
    a = write_leg(tmp_path / "a")
    b = write_leg(tmp_path / "b", change=flip_tensor("grads", "layers.2.w", 0, 0))
    kept = tensors_path(a, 2, 0, "grads").read_bytes()
    tensors_path(b, 2, 0, "grads").write_bytes(kept)
    assert "the kept values are equal" in str(compare_ledgers(a, b).first)
    tensors_path(b, 2, 0, "grads").write_bytes(kept[:-30])
    with pytest.raises(ArtifactError, match=r"layers\.2\.w cannot be read"):
        compare_ledgers(a, b)


@given(a=st.floats(width=32, allow_nan=False), b=st.floats(width=32, allow_nan=False))
def test_distance_is_symmetric_and_zero_exactly_for_equal_bits(a: float, b: float) -> None:
    distance = ulp_distance(a, b)
    assert distance == ulp_distance(b, a)
    equal = a == b and math.copysign(1, a) == math.copysign(1, b)
    assert (distance == 0) == equal


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_distance_counts_representable_values(dtype: str) -> None:
    one = np.ones((), dtype)
    tiny = np.nextafter(np.zeros((), dtype), one)
    assert ulp_distance(float(one), float(np.nextafter(one, 2 * one)), dtype) == 1
    assert ulp_distance(-0.0, 0.0, dtype) == 1
    assert ulp_distance(float(-tiny), float(tiny), dtype) == 3
    assert ulp_distance(float("nan"), 1.0, dtype) is None
    assert ulp_distance(-math.inf, math.inf, dtype) > 2 ** (np.dtype(dtype).itemsize * 8 - 2)


def test_nan_payloads_differ_without_a_distance() -> None:
    bits = np.array([0x7FC00000, 0x3F800000], np.uint32)
    other = np.array([0x7FC00001, 0x3F800003], np.uint32)
    a, b = elements_of([1.0, 1.0]), elements_of([1.0, 1.0])
    a.bits[:], b.bits[:] = bits, other
    found = diff_elements(a, b)
    assert found is not None
    assert (found.element, found.ulp, found.max_ulp, found.num_differing) == ((0,), None, 3, 2)
    assert (found.hex_a, found.hex_b) == ("0x7fc00000", "0x7fc00001")
    with pytest.raises(ValueError, match="no elements in common"):
        diff_elements(elements_of([1.0]), elements_of([1]))


def test_values_beyond_float32_are_compared_as_float64() -> None:
    assert elements_of([0.5, float("nan")]).dtype == "float32"
    assert elements_of([0.1]).dtype == "float64"
    assert elements_of([1, 2]).dtype == "int64"


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
    ids=str,
)
def test_kept_tensors_are_read_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.arange(6).reshape(2, 3) % 2).to(dtype)
    save_file({"x": tensor, "other": torch.zeros(5)}, tmp_path / "f.safetensors")
    elements = load_tensor(tmp_path / "f.safetensors", "x")
    assert elements.dtype == str(dtype).removeprefix("torch.")
    assert elements.bits.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert elements.bits.shape == (2, 3)
    with pytest.raises(ArtifactError, match="tensor y cannot be read"):
        load_tensor(tmp_path / "f.safetensors", "y")


def test_a_thousand_steps_of_three_hundred_tensors_are_compared_in_two_seconds(
    tmp_path: Path,
) -> None:
    names = [f"layers.{i}.w" for i in range(300)]

    def write(folder: Path, odd: str) -> None:
        # Written by hand: the writer syncs every line, which is not what is timed here.
        ledger = LedgerWriter(
            folder, header=LedgerHeader(trajectory="t", plan="p", run_id="r", leg="a")
        )
        lines = []
        for step in range(1001):
            odd_root = odd if step == 900 else f"{step:032x}"
            line = {
                "kind": "update",
                "step": step,
                "update": 0 if step else -1,
                "roots": dict.fromkeys(PROBES, f"{step:032x}") | {"weights": odd_root},
                "counts": dict.fromkeys(PROBES, 300),
                "chain": f"{step:032x}",
                "metrics": {f"m{i}": (0.1 * i).hex() for i in range(20)},
                "violations": [],
            }
            lines.append(json.dumps(line))
        with ledger.path.open("a") as file:
            file.write("\n".join(lines) + "\n")
        digests = {"weights": dict.fromkeys(names, "0" * 32) | {"layers.250.w": odd}}
        (folder / "digests").mkdir()
        (folder / "digests" / "step-000900-0.json").write_text(json.dumps(digests))

    write(tmp_path / "a", "a" * 32)
    write(tmp_path / "b", "b" * 32)
    started = time.perf_counter()
    found = compare_ledgers(tmp_path / "a", tmp_path / "b")
    assert time.perf_counter() - started < 2.0
    assert found.first is not None
    assert (found.first.step, found.first.probe, found.first.name) == (
        900,
        "weights",
        "layers.250.w",
    )


def test_a_number_of_optimizer_steps_is_named_without_a_tensor_of_it(tmp_path: Path) -> None:
    """A resume that restores the moments and not the counter: the file has moments alone."""

    def counted(steps: int) -> Change:
        def change(at: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
            if at == 2:
                tensors["optimizer"]["step"] = torch.tensor(steps)

        return change

    a, b = (write_leg(tmp_path / str(n), change=counted(n)) for n in (2, 1))
    for leg in (a, b):
        path = tensors_path(leg, 2, 0, "optimizer")
        save_file({n: t for n, t in load_file(path).items() if n != "step"}, path)
    found = compare_ledgers(a, b)
    assert found.verdict is Verdict.DIVERGED
    assert found.first is not None
    assert found.first.place == "step 2 update 0 optimizer step"
    assert "only its digest is kept" in found.first.detail
