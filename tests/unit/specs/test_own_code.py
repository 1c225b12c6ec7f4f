"""Own rewards and recipes: found by name, identified by their sources, refused with a reason."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from flows.train import resumable
from model_specs.errors import SpecError
from model_specs.fingerprint import spec_differences, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.user_code import load, locate

SPEC = load_recipe("tiny_cpu")
SCORE = "def score(completion, label, **_):\n    return 1.0\n"
RECIPE = """
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe

def recipe():
    return apply_overrides(load_recipe("tiny_cpu"), ("seeds.root=77",))

def broken():
    raise ValueError("no luck")

def wrong():
    return 5
"""


def _package(root: Path, name: str) -> Path:
    """`<name>.inner.rewards:score`, in a package of three files."""
    inner = root / name / "inner"
    inner.mkdir(parents=True)
    (root / name / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner / "rewards.py").write_text(SCORE)
    importlib.invalidate_caches()
    return inner


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_an_own_reward_is_identity_by_name_and_sources_not_by_place(tmp_path: Path) -> None:
    specs = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.py").write_text(SCORE)
        specs.append(apply_overrides(SPEC, (f"reward={tmp_path}/{place}/mine.py:score",)))
    assert specs[0].reward.name == "mine.py:score"
    assert specs[0].reward.source == str(tmp_path / "a" / "mine.py")
    assert specs[0].reward.source != specs[1].reward.source
    assert trajectory_fingerprint(specs[0]) == trajectory_fingerprint(specs[1])
    assert [name for name, _, _ in spec_differences(SPEC, specs[0])] == [
        "reward.digest",
        "reward.name",
    ]


def test_the_shorthand_and_the_field_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORE)
    name = f"{tmp_path}/mine.py:score"
    assert apply_overrides(SPEC, (f"reward={name}",)) == apply_overrides(
        SPEC, (f"reward.name={name}",)
    )
    own = apply_overrides(SPEC, (f"reward={name}",))
    back = apply_overrides(own, ("reward=digits",))
    assert back == SPEC  # source and digest of the own code went with it
    as_json = apply_overrides(SPEC, ('reward={"name": "gsm8k", "format_credit": 0.5}',))
    assert (as_json.reward.name, as_json.reward.format_credit) == ("gsm8k", 0.5)


def test_a_reward_of_a_package_is_digested_with_its_whole_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = _package(tmp_path, "own_package_one")
    monkeypatch.chdir(tmp_path)  # as a user in the folder of the package
    before = apply_overrides(SPEC, ("reward=own_package_one.inner.rewards:score",)).reward
    assert before.source == str(inner / "rewards.py")
    (inner / "helper.py").write_text("LIMIT = 1\n")
    after = locate("own_package_one.inner.rewards:score")
    assert after.digest != before.digest
    (inner / "helper.py").unlink()
    (inner / "notes.txt").write_text("no code")
    assert locate("own_package_one.inner.rewards:score").digest == before.digest
    assert load(after)("x", "y") == 1.0


def test_a_changed_reward_is_refused_where_its_digest_is_known(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SCORE)
    spec = apply_overrides(SPEC, (f"reward={file}:score",))
    assert apply_overrides(spec, ("plan.num_steps=9",)).reward == spec.reward
    file.write_text(SCORE.replace("1.0", "0.5"))
    with pytest.raises(SpecError, match=r"have digest .* but the spec was made with .*restore"):
        apply_overrides(spec, ())
    again = apply_overrides(spec, ("reward.digest=null",))
    assert trajectory_fingerprint(again) != trajectory_fingerprint(spec)


def test_a_reward_that_is_named_is_looked_up_anew_also_under_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, value in (("old", "1.0"), ("new", "0.5"), ("copy", "1.0")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.py").write_text(SCORE.replace("1.0", value))
    monkeypatch.chdir(tmp_path / "old")
    old = apply_overrides(SPEC, ("reward=mine.py:score", "reward.high=2.0"))
    monkeypatch.chdir(tmp_path / "new")
    assert apply_overrides(old, ()).reward == old.reward
    new = apply_overrides(old, ("reward=mine.py:score",))
    assert new.reward.source == str(tmp_path / "new" / "mine.py")
    assert new.reward.digest == locate("mine.py:score").digest != old.reward.digest
    assert new.reward.high == 2.0
    with pytest.raises(SpecError, match=r"keeps its trajectory, but .*reward\.digest: .* -> "):
        resumable(old, ("reward=mine.py:score",))
    monkeypatch.chdir(tmp_path / "copy")
    moved = resumable(old, ("reward=mine.py:score",))
    assert moved.reward == old.reward.model_copy(
        update={"source": str(tmp_path / "copy" / "mine.py")}
    )


def test_what_is_set_beside_a_reward_counts_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORE)
    overrides = ("reward.high=2.0", 'reward.options={"a": 1}', f"reward={tmp_path}/mine.py:score")
    spec = apply_overrides(SPEC, overrides)
    assert (spec.reward.high, spec.reward.options) == (2.0, '{"a":1}')
    assert spec == apply_overrides(SPEC, overrides[::-1])
    with pytest.raises(SpecError, match="the spec was made with abc"):
        apply_overrides(SPEC, ("reward.digest=abc", overrides[2]))


def test_a_recorded_file_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, "own_package_two")
    monkeypatch.chdir(tmp_path)
    spec = apply_overrides(SPEC, ("reward=own_package_two.inner.rewards:score",))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    program = (
        "import sys; from model_specs.run_spec import RunSpec\n"
        "from model_specs.user_code import load, locate\n"
        "reward = RunSpec.model_validate_json(sys.argv[1]).reward\n"
        "print(load(locate(reward.name, recorded_file=reward.source))('a', 'b'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, spec.model_dump_json()],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        check=True,
    )
    assert done.stdout == "1.0\n"


def test_a_module_that_is_another_file_than_the_digested_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("site", "checkout"):
        _package(tmp_path / place, "own_package_three")
    name = "own_package_three.inner.rewards:score"
    first, second = (
        locate(name, recorded_file=f"{tmp_path}/{place}/own_package_three/inner/rewards.py")
        for place in ("site", "checkout")
    )
    monkeypatch.syspath_prepend(tmp_path / "checkout")
    assert load(first)("x", "y") == 1.0  # out of its own folder, whatever comes first on the path
    with pytest.raises(SpecError) as caught:
        load(second)  # this process has imported the other copy already
    assert first.file in str(caught.value)
    assert second.file in str(caught.value)


def test_a_package_that_raised_is_not_left_half_imported(tmp_path: Path) -> None:
    inner = _package(tmp_path, "own_package_four")
    top = inner.parent / "__init__.py"
    top.write_text("raise RuntimeError('not yet')\n")
    (inner / "rewards.py").write_text("from own_package_four import LIMIT\n" + SCORE)
    code = locate("own_package_four.inner.rewards:score", recorded_file=f"{inner}/rewards.py")
    with pytest.raises(SpecError, match="raised RuntimeError: not yet"):
        load(code)
    top.write_text("LIMIT = 1\n")
    assert load(code)("x", "y") == 1.0


def test_an_own_recipe_is_a_file_or_a_module_and_labels_its_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_recipes.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    by_file = load_recipe("own_recipes.py:recipe")
    by_module = load_recipe("own_recipes:recipe")
    assert (by_file.recipe, by_file.seeds.root) == ("own_recipes.py:recipe", 77)
    assert by_file.recipe_digest == locate("own_recipes.py:recipe").digest
    assert by_file.recipe_digest == by_module.recipe_digest
    # The recipe is a way of writing the spec: what it returned is the identity.
    assert trajectory_fingerprint(by_file) == trajectory_fingerprint(by_module)
    assert by_file.model_copy(update={"recipe": "tiny_cpu", "recipe_digest": None}) == (
        apply_overrides(SPEC, ("seeds.root=77",))
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:broken", r"recipe own\.py:broken .* raised ValueError: no luck"),
        ("own.py:wrong", "returned a int, not a RunSpec"),
        ("own.py:none_such", "defines no 'none_such'"),
        ("gone.py:recipe", r"there is no file .*gone\.py"),
        ("no_such_package:recipe", "there is no module 'no_such_package', neither installed nor"),
        ("no_such_package.inner:recipe", "cannot be found"),
        ("own.py:", "names no function"),
        ("syntax.py:recipe", "is not valid Python"),
        ("raising.py:recipe", "raised RuntimeError: at import"),
        ("tiny", "known recipes: .*own recipes are named"),
    ],
)
def test_a_recipe_that_cannot_be_had_is_refused_with_the_reason(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(RECIPE)
    (tmp_path / "syntax.py").write_text("def recipe(:\n")
    (tmp_path / "raising.py").write_text("def recipe(): ...\nraise RuntimeError('at import')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=message):
        load_recipe(name)


def test_a_module_without_source_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'itertools' has no Python source"):
        locate("itertools:count")
