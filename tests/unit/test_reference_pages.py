"""The reference pages are what the code says, and the how-to pages name only what there is."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from engines.metrics import METRICS, unknown_metrics
from engines.train.registry import CAPABILITIES, refusals
from model_specs.errors import SpecError
from model_specs.field_schema import overrides_schema, spec_fields
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """tools/make_reference.py as a module."""
    path = ROOT / "tools" / "make_reference.py"
    specification = importlib.util.spec_from_file_location("make_reference", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["make_reference"] = module
    specification.loader.exec_module(module)
    return module


def test_the_reference_pages_are_current(generator: ModuleType) -> None:
    assert generator.outdated() == [], "run python tools/make_reference.py"


def test_a_page_that_says_something_else_is_found(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "reward/mean", METRICS["reward/std"])  # type: ignore[arg-type]
    assert generator.outdated() == ["metrics.md"]


def test_every_field_of_the_spec_can_be_set_and_has_a_schema_without_references() -> None:
    fields = spec_fields()
    assert fields["optimizer.lr"].schema == {"exclusiveMinimum": 0, "type": "number"}
    assert fields["plan.num_steps"].part == "plan"
    assert fields["execution.threads"].part == "execution"
    assert fields["reduction.kind"].schema["anyOf"][1]["const"] == "stock"
    # A plain value, or a group of its own.
    assert {"minimum": 0, "type": "number"} in fields["optimizer.weight_decay"].schema["anyOf"]
    assert any(name.startswith("optimizer.weight_decay.") for name in fields)
    assert "$ref" not in str(overrides_schema())
    # What `--set` takes beside the fields: two short forms, and no filter.
    more = overrides_schema()["properties"].keys() - fields.keys()
    assert more == {"reward", "numerics", "filter"}


def test_a_metric_that_the_table_lacks_is_found() -> None:
    assert unknown_metrics(["reward/mean", "reward/median", "eval/x/accuracy"]) == (
        "reward/median",
    )


OUT_OF_SCOPE = {
    "LoRA": "trainer_options.lora=true",
    "asynchronous rollout": "trainer_options.asynchronous=true",
    "multi-turn": "trainer_options.multi_turn=true",
    "multimodal": "trainer_options.multimodal=true",
    "critic": "trainer_options.critic=true",
    "supervised fine-tuning": "trainer_options.supervised=true",
    "tensor parallel": "trainer_options.tensor_parallel=2",
    "pipeline parallel": "trainer_options.pipeline_parallel=2",
    "other trackers": "trainer_options.tracker=wandb",
}


@pytest.mark.parametrize("name", OUT_OF_SCOPE)
def test_what_is_out_of_scope_is_refused_by_its_name_and_reason(name: str) -> None:
    (row,) = [row for row in CAPABILITIES if row.name == name]
    assert f"| {name} | {row.reason} |" in (ROOT / "docs" / "out-of-scope.md").read_text()
    spec = apply_overrides(load_recipe("tiny_cpu"), (OUT_OF_SCOPE[name],))
    (refusal,) = refusals(spec)
    assert refusal.startswith(f"{name} (")
    assert row.reason in refusal
    assert refusals(load_recipe("tiny_cpu")) == []


def test_a_cut_vocabulary_is_refused_beside_the_log_prob_gate_and_the_page_says_why() -> None:
    cut = "sampling.top_p=0.9"
    with pytest.raises(SpecError, match="renormalised over the kept tokens") as refused:
        apply_overrides(load_recipe("tiny_cpu"), (cut,))
    page = (ROOT / "docs" / "out-of-scope.md").read_text()
    assert f"| `{cut}` | {refused.value} |" in page
    allowed = apply_overrides(load_recipe("tiny_cpu"), (cut, "plan.gates.logprobs=off"))
    assert allowed.sampling.top_p == 0.9


def commands(page: Path) -> list[list[str]]:
    """The `lockstep run RECIPE` commands of a page that need no file of the reader's."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^lockstep run [^-].*$", text, re.M)
    placeholders = ("_DIR", "train.jsonl", "chat.jinja", "my_pkg", "FILE.py", "my_recipe")
    return [shlex.split(c) for c in found if not any(word in c for word in placeholders)]


def test_every_command_of_the_how_to_pages_makes_a_spec_that_can_be_run() -> None:
    checked = 0
    for page in HOW_TO:
        for command in commands(page):
            overrides = [command[n + 1] for n, word in enumerate(command) if word == "--set"]
            spec = apply_overrides(load_recipe(command[2]), tuple(overrides))
            assert refusals(spec) == [], page
            checked += 1
    assert checked >= 4
