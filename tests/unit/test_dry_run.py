"""`--dry-run` says what a run would be, and starts nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.dry import check, stage_plan
from model_specs.errors import ArtifactError, SpecError
from model_specs.fingerprint import plan_fingerprint, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("prefect", "ray", "torch", "vllm", "mlflow", "transformers")


def dry_run(*arguments: str, cwd: Path) -> tuple[str, list[str]]:
    """What a dry run prints, and which heavy packages it loaded."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["lockstep", "run", *sys.argv[1:], "--dry-run"]
from flows.cli import main
try:
    main()
except SystemExit as stopped:
    code = stopped.code
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stderr.splitlines()[-1].replace("'", '"'))


def test_a_dry_run_prints_spec_fingerprints_and_stages_and_starts_nothing(tmp_path: Path) -> None:
    changes = ("--set", "seeds.root=2", "--set", "plan.num_steps=6")
    stdout, loaded = dry_run("tiny_cpu", "--twin", "--json", *changes, cwd=tmp_path)
    assert loaded == []
    assert list(tmp_path.iterdir()) == []
    plan = json.loads(stdout)
    spec = apply_overrides(load_recipe("tiny_cpu"), ("seeds.root=2", "plan.num_steps=6"))
    assert plan["spec"] == json.loads(spec.model_dump_json())
    assert plan["trajectory_fingerprint"] == trajectory_fingerprint(spec)
    assert plan["plan_fingerprint"] == plan_fingerprint(spec)
    assert plan["stages"] == stage_plan(spec, twin=True)


def test_a_dry_run_for_people_names_the_fields_and_both_fingerprints(tmp_path: Path) -> None:
    stdout, _ = dry_run("tiny_cpu", "--set", "optimizer.lr=0.25", cwd=tmp_path)
    spec = apply_overrides(load_recipe("tiny_cpu"), ("optimizer.lr=0.25",))
    assert re.search(r"optimizer\.lr +0\.25", stdout)
    assert trajectory_fingerprint(spec) in stdout
    assert plan_fingerprint(spec) in stdout
    assert re.search(r"^  a train 1-4$", stdout, re.MULTILINE)


def test_the_stages_of_a_leg_are_in_the_order_in_which_they_run() -> None:
    spec = apply_overrides(load_recipe("tiny_cpu"), ("plan.num_steps=6",))
    assert stage_plan(spec, twin=False) == [
        "a download",
        "a convert",
        "a engines",
        "a preflight",
        "a train 1-4",
        "a checkpoint 4",
        "a train 5-6",
        "a checkpoint 6",
        "a export",
        "a layerwise",
        "a controls",
        "a gates",
    ]


def test_a_twin_is_the_same_leg_twice_and_a_comparison() -> None:
    spec = load_recipe("tiny_cpu")
    one = stage_plan(spec, twin=False)
    other = [row.replace("a ", "b ", 1) for row in one]
    assert stage_plan(spec, twin=True) == [*one, *other, "compare a b"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "flip", "said"),
    [
        ("no_such", (), None, "tiny_cpu"),
        ("tiny_cpu", ("optimizer.lrr=1",), None, "optimizer.lr"),
        ("tiny_cpu", ("optimizer.lr=-1",), None, "optimizer.lr"),
        ("tiny_cpu", ("reduction.slots=3",), None, "power of two"),
        ("tiny_cpu", (), "step=9,probe=grads", "1 to 8"),
        ("tiny_cpu", (), "step=1,probe=prompts", "cannot be flipped"),
        ("tiny_cpu", (), "step=1,probe=gradients", "is unknown"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_started(
    recipe: str, overrides: tuple[str, ...], flip: str | None, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        check(recipe, overrides, flip)


def test_data_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere does not exist.*data\.source=PATH"):
        check("tiny_cpu", (f"data.source={tmp_path / 'nowhere'}",), None)
    evals = f'plan.evals=[{{"name": "held-out", "source": "{tmp_path}", "split": "test", '
    evals += '"every": 2, "sampling": {"max_new_tokens": 4}}]'
    with pytest.raises(ArtifactError, match=r"has no test\.jsonl"):
        check("tiny_cpu", (evals,), None)
    (tmp_path / "test.jsonl").write_text("{}\n")
    check("tiny_cpu", (evals,), None)
    check("tiny_cpu", ("data.source=https://example.org/data",), None)
