"""Own rewards run apart, twice; whatever they do wrong ends clearly and names the sample."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from engines.contracts import Sample
from engines.rewards import isolated, score_samples
from model_specs.errors import DivergedError, EngineError, SpecError
from model_specs.run_spec import RewardSpec
from model_specs.user_code import locate

GOOD = """
import json

def score(completion, label, *, spec, finish_reason, metadata):
    print("a reward may print")
    bonus = json.loads(spec.options).get("bonus", 0.0)
    return (completion == label) / 2 + bonus + (metadata or {}).get("extra", 0.0)
"""


def _sample(index: int, text: str) -> Sample:
    return Sample(
        request_id=f"3/train-{index}/0",
        prompt_id=f"train-{index}",
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=(2,),
        logprobs=(-1.0,),
        text=text,
        finish_reason="stop",
    )


SAMPLES = [_sample(0, "yes"), _sample(1, "no"), _sample(2, "\ud800 \u2028")]
LABELS = {f"train-{index}": "yes" for index in range(3)}


def _spec(folder: Path, source: str, **fields: object) -> RewardSpec:
    file = folder / "mine.py"
    file.write_text(source)
    code = locate(f"{file}:score")
    return RewardSpec(name=code.name, source=code.file, digest=code.digest, **fields)  # type: ignore[arg-type]


def _body(line: str) -> str:
    return f"import os, random, sys, time\n\ndef score(completion, label, **_):\n    {line}\n"


def test_an_own_reward_scores_with_its_options_and_metadata(tmp_path: Path) -> None:
    spec = _spec(tmp_path, GOOD, options='{"bonus": 0.25}')
    metadata = {"train-1": '{"extra": 0.125}'}
    assert score_samples(SAMPLES, LABELS, spec, metadata=metadata) == (0.75, 0.375, 0.25)
    assert score_samples([], {}, spec) == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return random.random()", r"3 of 3 rewards .* first sample 3/train-0/0"),
        # The order of a set of strings depends on the hash seed of the process.
        ("return float(list({'ab', 'cd', 'ef', 'gh'}).index('ab')) / 4", "rewards"),
        ("score.n = getattr(score, 'n', 0) + 1; return score.n / 8", "first sample 3/train-0/0"),
    ],
)
def test_a_reward_that_is_no_function_is_diverged(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=message) as caught:
        score_samples(SAMPLES, LABELS, _spec(tmp_path, _body(line)))
    assert (caught.value.probe, caught.value.name) == ("rewards", "3/train-0/0")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return 1 / (completion != 'no')", "3/train-1/0 raised ZeroDivisionError.*'no'"),
        ("return float('nan' if completion == 'no' else 0)", "3/train-1/0 is nan"),
        ("return 2.0 if completion == 'no' else 0", r"3/train-1/0 is 2\.0, not in \[0\.0, 1\.0\]"),
        ("return 'good' if completion == 'no' else 0", r"3/train-1/0 returned a str \('good'\)"),
        ("return None", "returned a NoneType"),
        ("sys.stderr.write('bye'); os._exit(7)", "ended with status 7 at sample .*it wrote: bye"),
        ("raise SystemExit(3)", "ended with status 3 at sample 3/train-"),
    ],
)
def test_a_reward_that_fails_names_the_sample(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=message):
        score_samples(SAMPLES, LABELS, _spec(tmp_path, _body(line)))


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(60 if completion == 'no' else 0); return 0",
        # Holds the interpreter's lock: no thread or signal could end it from within.
        "import re; re.match('(a*)*b', 'a' * 40 if completion == 'no' else ''); return 0",
    ],
)
def test_a_reward_that_hangs_is_ended_and_names_the_sample(line: str, tmp_path: Path) -> None:
    spec = _spec(tmp_path, _body(line), timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"3/train-1/0 did not end within reward\.timeout_s=1"):
        score_samples(SAMPLES, LABELS, spec)
    assert time.monotonic() - started < 30
    left = [child for child in psutil.Process(os.getpid()).children() if _is_worker(child)]
    assert left == []


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "engines.rewards.worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_slow_rewards_within_the_limit_are_no_hang(tmp_path: Path) -> None:
    spec = _spec(tmp_path, _body("time.sleep(0.3); return 0"), timeout_s=0.8)
    assert score_samples(SAMPLES, LABELS, spec) == (0.0, 0.0, 0.0)


def test_a_reward_whose_sources_changed_during_the_run_is_refused(tmp_path: Path) -> None:
    spec = _spec(tmp_path, _body("return 0"))
    (tmp_path / "mine.py").write_text(_body("return 1"))
    with pytest.raises(SpecError, match="the run started with"):
        score_samples(SAMPLES, LABELS, spec)


def test_of_two_copies_of_a_reward_the_one_that_was_digested_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"site": 0.25, "checkout": 0.5}
    for place, value in values.items():
        package = tmp_path / place / "lab_pkg"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "r.py").write_text(_body(f"return {value}"))
    monkeypatch.chdir(tmp_path / "checkout")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])  # as installed
    code = locate("lab_pkg.r:score")
    assert code.file == str(tmp_path / "site" / "lab_pkg" / "r.py")
    # A run that was made in the checkout, too, keeps its copy where another one is installed.
    other = locate(code.name, recorded_file=str(tmp_path / "checkout" / "lab_pkg" / "r.py"))
    assert other.digest != code.digest
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for found in (code, other):
        spec = RewardSpec(name=found.name, source=found.file, digest=found.digest)
        expected = values[Path(found.file).parents[1].name]
        assert score_samples(SAMPLES, LABELS, spec) == (expected,) * 3


def test_a_reward_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _spec(tmp_path, "import no_such_module\n" + _body("return 0"))
    with pytest.raises(SpecError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        score_samples(SAMPLES, LABELS, spec)
    monkeypatch.setattr(isolated, "IMPORT_TIMEOUT_S", 0.0)
    with pytest.raises(EngineError, match="was not ready within 0 s"):
        score_samples(SAMPLES, LABELS, spec)
