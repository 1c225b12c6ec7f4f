"""Acts as a new user: a wheel in a clean environment, an own package, and the console command.

    python -m tests.acceptance.new_user WORK [--from-scratch]

WORK is a new folder outside of the checkout. The environment borrows the dependencies of the one
that runs this script; with `--from-scratch` pip makes it from an index, which takes minutes and
3.6 GB, and the twin has all gates. Each step prints what it did and what it saw, and ends the
script where that is not what the user was promised.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.wheel_environment import (
    borrowed_environment,
    build_wheel,
    install,
    scratch_environment,
    wheel_of,
)
from tests.flows.command_line import Ended, clean_environment, finished, wait_until

MY_LAB = Path(__file__).with_name("my_lab")
RECIPE = "my_lab.recipes:recipe"
GATES_OFF = tuple(
    part
    for gate in ("controls", "layerwise", "preflight")
    for part in ("--set", f"plan.gates.{gate}=off")
)
"""Gates that cost a start of native vLLM, or probes; the log-prob gate stays."""

MAKE_INPUTS = """
import sys
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from engines.checkpoint.tiny_model import write_tiny_model
from model_specs.model_spec import ModelSpec

out = Path(sys.argv[1])
write_tiny_model(out / "model", ModelSpec(
    family="llama", path="generated:tiny", num_layers=3, hidden_size=96, intermediate_size=160,
    num_attention_heads=3, num_key_value_heads=1, head_dim=32, vocab_size=104,
    max_position_embeddings=256, rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=False,
    qkv_bias=False, dtype="float32"), seed=7)
rows = [{"question": f"{a} + {b}", "answer": str(a + b), "about": {"longest": 4}}
        for a in range(3, 10) for b in range(11, 19)]
pq.write_table(pa.Table.from_pylist(rows), out / "train.parquet")
"""

COMPARE_IN_MLFLOW = """
import json, sys
from mlflow import MlflowClient

client = MlflowClient("sqlite:///runs/mlflow.db")
experiment = client.get_experiment_by_name("my_lab").experiment_id

def found(**tags):
    clauses = [f"tags.`lockstep.{name}` = '{value}'" for name, value in tags.items()]
    return client.search_runs([experiment], filter_string=" and ".join(clauses))

same = sys.argv[1]
runs = found(kind="run", trajectory_fingerprint=same)
legs = found(kind="leg", trajectory_fingerprint=same)
print(json.dumps({
    "runs": {run.data.tags["lockstep.run_id"]: run.data.tags for run in runs},
    "legs": {run.data.tags["lockstep.run_id"] + "/" + run.data.tags["lockstep.leg"]:
             run.data.metrics for run in legs},
    "artifacts": sorted(file.path for file in client.list_artifacts(legs[0].info.run_id)),
    "children": [run.data.tags["lockstep.run_id"]
                 for run in found(kind="run", parent="interrupted/a@4")],
}))
"""

LOAD_EXPORT = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("3 + 11", return_tensors="pt").input_ids
out = model.generate(ids, max_new_tokens=4, do_sample=False)
print(type(model).__name__, model.config.hidden_size, out.shape[1] - ids.shape[1])
"""


@dataclass(kw_only=True)
class User:
    """A working folder outside of the checkout, and the console command of an environment."""

    folder: Path
    python: Path
    began: float
    thorough: bool = False
    """Whether the twin has all gates."""

    @property
    def environment(self) -> dict[str, str]:
        """A fresh shell with the environment active; nothing points to the checkout."""
        clean = clean_environment(self.folder / "prefect home", MLFLOW_EXPERIMENT_NAME="my_lab")
        clean.pop("PYTHONPATH", None)
        return {**clean, "PATH": f"{self.python.parent}{os.pathsep}{clean['PATH']}"}

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `lockstep` and return at once."""
        return subprocess.Popen(
            ["lockstep", *arguments],
            executable=str(self.python.with_name("lockstep")),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def lockstep(self, *arguments: str, code: int = 0) -> Ended:
        """Run `lockstep` to its end, and require its exit code."""
        ended = finished(self.start(*arguments), *arguments)
        assert ended.code == code, ended
        self.say(f"lockstep {' '.join(arguments)} -> exit code {ended.code}")
        return ended

    def program(self, text: str, *arguments: str) -> str:
        """Run a short Python program in the environment."""
        ended = subprocess.run(
            [str(self.python), "-c", text, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        return ended.stdout.strip()

    def run_file(self, name: str) -> Path:
        """A file below the folder of runs."""
        return self.folder / "runs" / name


def installed(work: Path, *, from_scratch: bool) -> User:
    """Build the wheel, make the environment, and install the group's own package in it."""
    began = time.monotonic()
    work.mkdir(parents=True)
    wheel = build_wheel(work / "build")
    make = scratch_environment if from_scratch else borrowed_environment
    folder = work / "user"
    folder.mkdir()
    python = make(work / "env", wheel)
    user = User(folder=folder, python=python, began=began, thorough=from_scratch)
    user.say(f"installed {wheel.name} in {work / 'env'}")
    source = Path(shutil.copytree(MY_LAB, work / "my_lab"))
    user.program(MAKE_INPUTS, str(source / "my_lab"))
    install(user.python, wheel_of(source, work / "my_lab_wheel"))
    user.say("installed my_lab: a 3-layer Llama, 56 questions as parquet, a reward, a recipe")
    return user


def the_code_is_the_wheels(user: User) -> None:
    """No file of the checkout is imported: not by Python, not by an engine under Ray."""
    names = ("flows", "tasks", "engines", "model_specs", "my_lab")
    program = f"import {', '.join(names)}; print(*(m.__file__ for m in ({', '.join(names)})))"
    env = user.python.parents[1]
    for file in user.program(program).split():
        assert Path(file).is_relative_to(env), file
    user.say(f"all packages are imported from {env}")


def dry_run(user: User) -> None:
    """Look at the plan, by module and by file: it is one trajectory, and nothing is started."""
    (user.folder / "my_recipe.py").write_text("from my_lab.recipes import recipe as recipe\n")
    plans = [
        json.loads(user.lockstep("run", name, "--dry-run", "--json").stdout)
        for name in (RECIPE, "my_recipe.py:recipe")
    ]
    assert plans[0]["trajectory_fingerprint"] == plans[1]["trajectory_fingerprint"]
    model = plans[0]["spec"]["model"]
    assert (model["family"], model["hidden_size"], model["num_layers"]) == ("llama", 96, 3)
    user.say(f"the plan needs {plans[0]['disk_need']} and has {len(plans[0]['stages'])} stages")
    assert not (user.folder / "runs").exists()


def run_twin(user: User) -> None:
    """Two legs: Identical, and aligned at 0.0."""
    gates = () if user.thorough else GATES_OFF
    ended = user.lockstep("run", RECIPE, "--twin", "--run-id", "twin", *gates)
    verdict = json.loads(user.run_file("twin/verdict.json").read_text())
    assert verdict["verdict"] == "Identical"
    assert verdict["alignment"]["max_abs_diff"] == 0.0
    if user.thorough:
        assert verdict["native_control"]["verdict"] == "Misaligned"
    for leg in "ab":
        text = user.run_file(f"twin/{leg}/environment.json").read_text()
        folders = re.findall(r'"code_folder": "(.*?)"', text)
        assert len(folders) >= 2, text  # of the trainer and of the rollout engine
        assert all(Path(found).is_relative_to(user.python.parents[1]) for found in folders), folders
    first = json.loads(user.run_file("twin/a/prompts.json").read_text())["first"]
    assert first["text"].startswith("<|start|>user\nCompute "), first
    (headline,) = re.findall(r"^6 steps.*$", ended.stdout, re.M)
    user.say(f"Identical: {headline}; engines under Ray ran the wheel's code")


def run_and_kill(user: User) -> None:
    """Kill the driver with -9 once step 3 is in the ledger; nothing of the run goes on."""
    arguments = ("run", "my_recipe.py:recipe", "--run-id", "interrupted", *GATES_OFF)
    process = user.start(*arguments)
    ledger = user.run_file("interrupted/a/ledger.jsonl")

    def is_at_step_3() -> bool:
        assert process.poll() is None, finished(process, *arguments)
        return ledger.is_file() and '"step":3,' in ledger.read_text()

    try:
        wait_until(is_at_step_3, seconds=240, what="step 3 is in the ledger")
    finally:
        process.kill()
        process.communicate()
    steps = num_steps(ledger)
    assert steps < 6, f"the run was at step {steps} already"
    assert not user.run_file("interrupted/verdict.json").exists()
    wait_until(lambda: not processes_of(user), seconds=60, what="all processes of the run ended")
    user.say(f"lockstep {' '.join(arguments)} -> killed at step {steps}; no process is left")


def line_with(part: str, text: str) -> str:
    """The first line that has this part."""
    found = next((line for line in text.splitlines() if part in line), None)
    assert found is not None, f"{part!r} is not in\n{text}"
    return found


def num_steps(ledger: Path) -> int:
    """The newest step of a ledger whose last line may be torn."""
    return max(int(step) for step in re.findall(r'"step":(\d+),', ledger.read_text()))


def processes_of(user: User) -> list[int]:
    """Processes that were started with the user's environment."""
    mark = f"PREFECT_HOME={user.folder / 'prefect home'}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def resume(user: User) -> None:
    """Go on, over the end of an epoch: bit for bit the twin, which nobody interrupted."""
    user.lockstep("resume", "interrupted")
    ended = user.lockstep("diff", "interrupted/a", "twin/a")
    assert "\nIdentical\n6 steps" in ended.stdout, ended
    user.say(f"the resumed run is the uninterrupted one: {line_with('6 steps', ended.stdout)}")


def fork(user: User) -> None:
    """Branch off with another learning rate; the difference is found where it begins."""
    user.lockstep("fork", "interrupted@4", "--run-id", "slower", "--set", "optimizer.lr=1e-3")
    shown = user.lockstep("show", "slower").stdout
    assert "forked from   interrupted/a@4" in shown, shown
    compared = ("diff", "interrupted", "slower", "--across", "origin,optimizer.lr")
    ended = user.lockstep(*compared, code=10)
    user.say(line_with("first difference at step 5 update 0", ended.stdout))


def export(user: User) -> None:
    """Export a checkpoint; transformers loads it and writes with it."""
    found = json.loads(
        user.lockstep("export", "interrupted@4", "--out", "exported", "--json").stdout
    )
    assert found["step"] == 4
    said = user.program(LOAD_EXPORT, "exported").splitlines()[-1]
    assert said == "LlamaForCausalLM 96 4", said
    user.say(f"transformers loads {found['folder']}: {said}")


def verify(user: User) -> None:
    """Run one checkpoint interval again."""
    ended = user.lockstep("verify", "interrupted", "--segment", "2")
    assert "\nIdentical\nsegment 2 (steps 3 to 4), cost " in ended.stdout, ended
    user.say(re.findall(r"^segment 2 .* cost .*$", ended.stdout, re.M)[0])
    # The model came from the run's own copy.
    (manifest,) = user.folder.glob("runs/interrupted/verify/*/a/model/manifest.json")
    own_copy = str(user.run_file("interrupted/a/model").resolve())
    assert json.loads(manifest.read_text())["source"] == own_copy


def compare_in_mlflow(user: User) -> None:
    """Find the runs of one trajectory and a run's children by their tags."""
    header = json.loads(user.run_file("twin/a/ledger.jsonl").read_text().splitlines()[0])
    trajectory = header["trajectory"]
    found: dict[str, Any] = json.loads(user.program(COMPARE_IN_MLFLOW, trajectory).splitlines()[-1])
    assert sorted(found["runs"]) == ["interrupted", "twin"]
    verdicts = {run: tags["lockstep.verdict"] for run, tags in found["runs"].items()}
    assert verdicts == {"interrupted": "Aligned", "twin": "Identical"}
    assert len({tags["lockstep.chain_digest"] for tags in found["runs"].values()}) == 1
    assert sorted(found["legs"]) == ["interrupted/a", "twin/a", "twin/b"]
    for name in ("reward/mean", "eval/held_out/accuracy", "gate/logprob_abs_diff/max"):
        values = {metrics[name] for metrics in found["legs"].values()}
        assert len(values) == 1, (name, values)
    assert {"ledger.jsonl", "prompts.json"} <= set(found["artifacts"])
    assert found["children"] == ["slower"]
    user.say(f"MLflow finds {verdicts} by trajectory, {found['children']} by parent")


def refused(user: User) -> None:
    """What cannot be repeated, and what is not supported, ends by name."""
    coin = ("run", RECIPE, "--run-id", "coin", "--set", "reward=my_lab.rewards:coin", *GATES_OFF)
    ended = user.lockstep(*coin, code=10)
    assert "\nDiverged\n" in ended.stdout, ended
    assert "rewards" in ended.stdout.split("\nDiverged\n")[1], ended
    user.say("a reward that tosses coins is Diverged at probe rewards")
    (user.folder / "falcon").mkdir()
    (user.folder / "falcon" / "config.json").write_text('{"model_type": "falcon"}')
    ended = user.lockstep("run", RECIPE, "--set", "model.path=falcon", code=2)
    known = "model_type 'falcon' is not supported; known types: llama, qwen2, qwen3, qwen3_moe"
    assert known in ended.stderr, ended
    user.say(known)


STEPS: tuple[Callable[[User], None], ...] = (
    *(the_code_is_the_wheels, dry_run, run_twin, run_and_kill, resume, fork, export, verify),
    *(compare_in_mlflow, refused),
)


def main(work: Path, *, from_scratch: bool) -> None:
    """Take all steps in their order."""
    user = installed(work, from_scratch=from_scratch)
    for step in STEPS:
        step(user)
    user.say("done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="new folder outside of the checkout")
    parser.add_argument("--from-scratch", action="store_true", help="let pip make the environment")
    given = parser.parse_args()
    main(given.work.resolve(), from_scratch=given.from_scratch)
