"""What a user does at the command line, sees there, and gets as exit code; real processes.

Exit code 11 is in `test_alignment`, 20 in `test_processes`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines import guard
from engines.provenance.ledger import read_ledger
from engines.provenance.verdict import Verdict
from tests.flows.command_line import (
    ROOT,
    SHORT,
    CommandLine,
    Ended,
    finished,
    is_alive,
    mark_of,
    wait_until,
)
from tests.flows.conftest import Runner

pytestmark = pytest.mark.slow

STEP_LINE = re.compile(
    r"(?P<leg>[ab]) (?P<step>\d+)/8 reward \d\.\d\d groups [0-4]/4 len \d+ trunc [01]\.\d\d "
    r"grad \S+ gate 0\.0/[1-9]\d*tok chain [0-9a-f]{4} \d+(\.\d)?s"
)
LEG_FILES = ("lock.json", "ledger.jsonl", "environment.json", "gates.json", "spec.json")


def verdict_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "verdict.json").read_text())


# The main job.


def test_the_main_job_ends_identical_with_exit_code_0(twin: Ended, twin_folder: Path) -> None:
    assert twin.code == 0, twin
    assert "\nIdentical\n" in twin.stdout
    details = verdict_of(twin_folder)
    assert (details["verdict"], details["comparison"]["verdict"]) == ("Identical", "Identical")
    assert details["comparison"]["common_steps"] == 8
    chain = details["comparison"]["chain_digest"]
    assert re.fullmatch("[0-9a-f]{32}", chain)
    assert f"chain digest  {chain}" in twin.stdout
    assert {leg["chain_digest"] for leg in details["legs"].values()} == {chain}


def test_the_legs_are_other_processes_and_reuse_nothing(twin: Ended, twin_folder: Path) -> None:
    legs = verdict_of(twin_folder)["legs"]
    facts = [facts for leg in legs.values() for facts in leg["processes"].values()]
    assert len(facts) == 4, twin
    assert len({fact["pid"] for fact in facts}) == 4
    assert len({fact["started_at"] for fact in facts}) == 4
    assert [leg["cached_stages"] for leg in legs.values()] == [0, 0]
    for name in "ab":
        engines = r"rollout-0 pid \d+ started \d\d:\d\d:\d\d, trainer-0 pid \d+ started \S+"
        assert re.search(f"^leg {name}: {engines}; cached stages 0$", twin.stdout, re.MULTILINE)
    for fact in facts:
        assert not is_alive(int(fact["pid"]), fact["started_at"])


def test_each_leg_shows_a_sample_and_a_line_a_step(twin: Ended) -> None:
    for leg in "ab":
        assert re.search(rf"^{leg} prompt +'.*What is .*'$", twin.stdout, re.MULTILINE), twin
        assert re.search(rf"^{leg} completion +['\"].+['\"]$", twin.stdout, re.MULTILINE)
        reward = rf"^{leg} reward +\d\.\d\d, finish reason (stop|length)$"
        assert re.search(reward, twin.stdout, re.MULTILINE)
    found = [STEP_LINE.fullmatch(line) for line in twin.stdout.splitlines()]
    steps = [(match["leg"], int(match["step"])) for match in found if match]
    assert steps == [(leg, step) for leg in "ab" for step in range(1, 9)]


def test_alignment_is_exact_and_its_controls_stand_beside_it(
    twin: Ended, twin_folder: Path
) -> None:
    for leg in "ab":
        gates = json.loads((twin_folder / leg / "gates.json").read_text())
        aligned = gates["logprobs"]
        assert aligned["verdict"] == "Aligned"
        assert aligned["figures"]["max_abs_diff"] == 0.0
        assert aligned["figures"]["num_exact"] == aligned["figures"]["num_tokens"] > 1000
        native = gates["native control"]
        assert (native["verdict"], native["holds"]) == ("Misaligned", True)
        assert native["figures"]["max_abs_diff"] > 0.0
        assert gates["preflight"]["verdict"] == "Aligned"
        assert gates["exported weights"]["figures"]["max_abs_diff"] == 0.0
        assert gates["stock control"]["holds"], gates["stock control"]["summary"]
        shown = rf"leg {leg} logprobs: Aligned, max 0.0 over \d+ tokens, 100.00% exactly equal"
        assert re.search(shown, twin.stdout)
        assert re.search(rf"leg {leg} native control: Misaligned, .*max 0\.\d+", twin.stdout)


def test_the_run_folder_holds_the_records(twin: Ended, twin_folder: Path) -> None:
    assert f"run folder    {twin_folder}" in twin.stdout
    for name in ("run.json", "spec.json", "verdict.json", "report.md"):
        assert (twin_folder / name).stat().st_size > 0
    for leg in "ab":
        for name in LEG_FILES:
            assert (twin_folder / leg / name).stat().st_size > 0
    specs = [json.loads((twin_folder / leg / "spec.json").read_text()) for leg in "ab"]
    orders = [spec["execution"].pop("request_order_seed") for spec in specs]
    assert orders[0] != orders[1]
    assert specs[0] == specs[1]
    assert "# Identical" in (twin_folder / "report.md").read_text()


def test_mlflow_has_the_run_its_legs_and_each_step_once(twin: Ended, twin_folder: Path) -> None:
    from mlflow import MlflowClient

    database = twin_folder.parent / "mlflow.db"
    assert f"mlflow ui --backend-store-uri 'sqlite:///{database}'" in twin.stdout, twin
    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "tiny_cpu"]
    parents = client.search_runs(
        [experiment.experiment_id],
        "tags.`lockstep.run_id` = 'twin' and tags.`lockstep.kind` = 'run'",
    )
    assert [parent.data.tags["lockstep.verdict"] for parent in parents] == ["Identical"]
    children = client.search_runs(
        [experiment.experiment_id], f"tags.mlflow.parentRunId = '{parents[0].info.run_id}'"
    )
    assert sorted(child.data.tags["lockstep.leg"] for child in children) == ["a", "b"]
    for child in children:
        recorded = read_ledger(twin_folder / child.data.tags["lockstep.leg"]).lines[1:]
        for name in ("reward/mean", "gate/logprob_abs_diff/max", "train/grad_norm"):
            points = client.get_metric_history(child.info.run_id, name)
            shown = [(point.step, point.value) for point in points]
            assert sorted(shown) == [(line.step, line.metrics[name]) for line in recorded]


def test_show_and_diff_of_the_main_job_end_with_0(lockstep: CommandLine, twin: Ended) -> None:
    shown = lockstep("show", "twin")
    assert shown.code == 0, shown
    assert "Identical" in shown.stdout
    as_json = lockstep("show", "twin", "--json")
    assert as_json.code == 0
    assert json.loads(as_json.stdout)["verdict"] == "Identical"
    compared = lockstep("diff", "twin")
    assert compared.code == 0, compared
    assert "8 steps" in compared.stdout
    assert json.loads(lockstep("diff", "twin/a", "twin/b", "--json").stdout)["common_steps"] == 8
    locks = [str(lockstep.runs_dir / "twin" / leg / "lock.json") for leg in "ab"]
    assert "digests equal" in lockstep("diff", *locks).stdout


# Exit codes.


def test_exit_code_1_is_an_internal_error_with_its_traceback(lockstep: CommandLine) -> None:
    """No user should meet it, so a defect is put into the program."""
    program = (
        "import flows.console, flows.cli\n"
        "flows.console.show_run = lambda *args, **kwargs: [][1]\n"
        "flows.cli.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "show", "anything"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=dict(lockstep.environment),
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1, ended
    assert "IndexError: list index out of range" in ended.stderr


def test_a_flow_that_fails_on_a_defect_ends_with_1_and_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from prefect.states import Failed

    from flows.console import show_outcome

    state = Failed(data=ZeroDivisionError("a defect"), message="a defect")
    assert show_outcome(state, as_json=True) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "ZeroDivisionError: a defect" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "tiny"), "tiny_cpu"),
        (("run", "tiny_cpu", "--set", "optimizer.learning_rate=1"), "optimizer.learning_rate"),
        (("run", "tiny_cpu", "--inject-flip", "step=1,probe=grads"), "--twin"),
        (("run", "tiny_cpu", "--twin", "--inject-flip", "step=9,probe=grads"), "1 to 8"),
        (("run", "tiny_cpu", "--no-such-option"), "--no-such-option"),
        (("show", "no-such-run"), "known runs"),
        (("resume", "no-such-run@last"), "STEP is a whole number"),
    ],
)
def test_exit_code_2_is_a_mistake_of_the_user_with_what_to_do(
    lockstep: CommandLine, arguments: tuple[str, ...], said: str
) -> None:
    ended = lockstep(*arguments)
    assert ended.code == 2, ended
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_exit_code_10_is_a_flip_named_down_to_the_element(
    lockstep: CommandLine, flipped: Ended
) -> None:
    assert flipped.code == 10, flipped
    details = json.loads(flipped.stdout)
    assert "b 2/2 reward" in flipped.stderr
    assert details["verdict"] == "Diverged"
    first = details["comparison"]["first"]
    assert (first["step"], first["probe"], first["ulp"]) == (2, "grads", 1)
    named = rf"step 2 update 0 grads {re.escape(first['name'])}\[[0, ]+\]: \S+ .*\| \S+ .*, 1 ULP"
    shown = lockstep("show", "flipped")
    assert shown.code == 10
    assert re.search(named, shown.stdout), shown
    assert repr(first["value_a"]) in shown.stdout
    assert repr(first["value_b"]) in shown.stdout
    compared = lockstep("diff", "flipped")
    assert compared.code == 10
    assert "execution execution.request_order_seed: None | " in compared.stdout
    assert lockstep("diff", "flipped/a@0", "flipped/b@0").code == 0
    states = lockstep("diff", "flipped/a@0", "flipped/a@2", "--json")
    assert states.code == 10, states
    state = json.loads(states.stdout)
    assert state["sides"] == {"a": "flipped/a@0", "b": "flipped/a@2"}
    assert (state["first"]["probe"], state["first"]["name"]) == ("weights", first["name"])
    assert sum(row[2] for row in state["first"]["ulp_histogram"]) > 1000


def test_exit_code_12_names_the_field_that_makes_two_runs_incomparable(
    lockstep: CommandLine, runner: Runner
) -> None:
    legs = [runner.run(f"seeds.root={root}", steps=1) for root in (1, 2)]
    for root, leg in zip((1, 2), legs, strict=True):
        spec = json.loads(runner.opened.spec.model_dump_json())
        (leg / "spec.json").write_text(json.dumps(spec | {"seeds": {"root": root}}))
    ended = lockstep("diff", *map(str, legs))
    assert ended.code == 12, ended
    assert "Incomparable" in ended.stdout
    assert "identity seeds.root: 1 | 2" in ended.stdout
    assert lockstep("diff", *map(str, legs), "--across", "seeds").code == 10


def test_exit_code_13_is_a_comparison_of_nothing(lockstep: CommandLine, runner: Runner) -> None:
    """Two legs that stopped after the first push: their ledgers have no step."""
    legs = [runner.run(steps=0) for _ in range(2)]
    ended = lockstep("diff", *map(str, legs))
    assert ended.code == 13, ended
    assert "Vacuous" in ended.stdout
    assert "no step in common" in ended.stdout


def test_exit_code_14_names_what_is_not_supported(lockstep: CommandLine) -> None:
    shape = ("model.head_dim=16", "model.num_attention_heads=8", "model.num_key_value_heads=4")
    overrides = [part for change in shape for part in ("--set", change)]
    ended = lockstep("run", "tiny_cpu", *overrides, *SHORT)
    assert ended.code == 14, ended
    assert "head_dim=16" in ended.stdout
    assert "32, 64" in ended.stdout


@pytest.mark.exhaustive
def test_exit_code_130_is_a_cancelled_run_and_leaves_no_process(
    lockstep_alone: CommandLine,
) -> None:
    arguments = ("run", "tiny_cpu", "--run-id", "cancelled", "--set", "plan.num_steps=500", *SHORT)
    process = lockstep_alone.start(*arguments)
    assert process.stdout is not None
    wait_for_line(process, r"^a 2/500 ")
    mark = mark_of(psutil.Process(process.pid))
    process.send_signal(signal.SIGINT)
    ended = finished(process, *arguments)
    assert ended.code == 130, ended
    assert "cancelled; `lockstep resume RUN` goes on" in ended.stderr
    assert "Traceback" not in ended.stderr
    wait_until(
        lambda: not guard.marked_processes(mark), seconds=30, what=f"no process carries {mark}"
    )
    assert read_ledger(lockstep_alone.runs_dir / "cancelled" / "a").last_step >= 2
    shown = lockstep_alone("show", "cancelled", "--json")
    assert shown.code == Verdict.VACUOUS.exit_code
    assert json.loads(shown.stdout)["verdict"] is None


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> str:
    """Read lines of a running command until one matches."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no line like {pattern!r}: {''.join(seen)}{process.communicate()[1]}")
