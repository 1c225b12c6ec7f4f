"""The driver's side: every rank is called alike, rank 0 answers, and torch is never imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import engines.train.group as group_module
from engines.contracts import TrainSample
from engines.train.group import TRAINERS, TrainerGroup, trainer_env
from model_specs.errors import CheckpointError, EngineError
from model_specs.recipes.tiny_cpu import recipe
from model_specs.run_spec import ExecutionSpec, RunSpec

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class FakeRank:
    """Stands for an engine process: answers at once from a table, and remembers calls."""

    answers: dict[str, Any]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((method, args, kwargs))
        answer = self.answers.get(method)
        return answer(*args) if callable(answer) else answer


@pytest.fixture(autouse=True)
def _answers_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "gather_work", lambda references, **_: list(references))


def spec(ranks: int) -> RunSpec:
    return recipe().model_copy(update={"execution": ExecutionSpec(trainer_ranks=ranks, threads=3)})


def trainer(*answers: dict[str, Any]) -> tuple[TrainerGroup, list[FakeRank]]:
    ranks = [FakeRank(answer) for answer in answers]
    return TrainerGroup(ranks, spec(len(ranks))), ranks  # type: ignore[arg-type]


def test_every_rank_gets_the_same_call_and_rank_zero_answers() -> None:
    group, ranks = trainer({"score": "r0"}, {"score": "r1"})
    sample = TrainSample(request_id="a", prompt_token_ids=(1,), token_ids=(2,))
    assert group.score([sample]) == "r0"
    assert ranks[0].calls == ranks[1].calls == [("score", ([sample],), {"flip": None})]


def test_another_number_of_processes_than_the_spec_says_is_refused() -> None:
    with pytest.raises(EngineError, match="1 trainer processes"):
        TrainerGroup([FakeRank({})], spec(2))  # type: ignore[list-item]


def test_ranks_that_disagree_about_the_state_are_refused() -> None:
    group, _ = trainer({"state_digest": "x"}, {"state_digest": "y"})
    with pytest.raises(EngineError, match=r"\['x', 'y'\]"):
        group.state_digest()


def test_ensure_at_loads_only_what_is_not_held_and_checks_it() -> None:
    state = {"digest": "old"}

    def load(path: str) -> None:
        state["digest"] = Path(path).name

    group, (rank,) = trainer({"state_digest": lambda: state["digest"], "load": load})
    assert group.ensure_at("/c/old", "old") is False
    assert all(method != "load" for method, _, _ in rank.calls)
    assert group.ensure_at("/c/new", "new") is True
    with pytest.raises(CheckpointError, match="holds state torn, but newer was asked for"):
        group.ensure_at("/c/torn", "newer")


def test_ranks_in_different_environments_are_refused_by_name() -> None:
    one = {"isa": "AVX512", "ambient": {"pid": 1}}
    group, _ = trainer({"environment": one}, {"environment": {**one, "ambient": {"pid": 2}}})
    assert group.environment()["isa"] == "AVX512"
    group, _ = trainer({"environment": one}, {"environment": {**one, "isa": "AVX2"}})
    with pytest.raises(EngineError, match=r"rank 1 .* isa is 'AVX2' there and 'AVX512' here"):
        group.environment()


def test_environment_of_a_rank_follows_the_spec() -> None:
    env = trainer_env(spec(1))
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert all(isinstance(value, str) for value in env.values())


def test_every_trainer_of_the_spec_has_an_import_path() -> None:
    assert recipe().trainer in TRAINERS


def test_drivers_side_imports_no_torch() -> None:
    code = (
        "import sys, engines.train.group, engines.train.advantages, engines.train.lr_schedule;"
        "import engines.checkpoint.dcp;"
        "sys.exit(sorted({'torch', 'ray', 'vllm'} & set(sys.modules)).__repr__() "
        "if {'torch', 'ray', 'vllm'} & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
