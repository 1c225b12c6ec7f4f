"""The independent checker on a run that met a NaN: it is honest, and is called so.

tests/flows/test_check_run.py has a real run, and what is edited in it.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from engines.contracts import Sample, StepRecord
from engines.gates.logprobs import compare_logprobs
from engines.provenance.digest import digest_floats, digest_tokens
from engines.provenance.ledger import LedgerHeader, LedgerWriter, roots_of
from engines.train.advantages import group_advantages
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.recipes.tiny_cpu import recipe

CHECKER = Path(__file__).resolve().parents[2] / "tools" / "check_run.py"
SIZES = (
    *("data.prompts_per_step=1", "sampling.samples_per_prompt=2"),
    *("reduction.slots=2", "plan.num_steps=1", "plan.checkpoint_every=1"),
)
NAN = struct.unpack(">d", bytes.fromhex("fff8000000000000"))[0]
"""As x86 makes it, with its sign."""
INF = float("inf")


def write_run(run: Path, rollout: list[list[float]], trainer: list[list[float]]) -> None:
    """One leg of one step with two samples, of these log-probs."""
    spec, leg = apply_overrides(recipe(), SIZES), run / "a"
    names, texts = ("1/p/0", "1/p/1"), ("1", "x")
    tokens = [list(range(len(row))) for row in rollout]
    samples = [
        Sample(
            request_id=name,
            prompt_id="p",
            sample_index=index,
            prompt_token_ids=(1,),
            token_ids=tuple(tokens[index]),
            logprobs=tuple(rollout[index]),
            text=texts[index],
            finish_reason="length",
        )
        for index, name in enumerate(names)
    ]
    scores = dict(zip(names, trainer, strict=True))
    gate = compare_logprobs(1, samples, scores)
    rewards = [struct.unpack("<f", struct.pack("<f", value))[0] for value in (0.6, 0.0)]
    advantages = group_advantages([rewards], spec.loss, seed=0).values
    values = {
        "prompts": {"p": [1]},
        "tokens": dict(zip(names, tokens, strict=True)),
        "rollout_logprobs": dict(zip(names, rollout, strict=True)),
        "rewards": {name: [value] for name, value in zip(names, rewards, strict=True)},
        "advantages": {name: [value] for name, value in zip(names, advantages, strict=True)},
        "train_logprobs": scores,
    }
    digests = {
        probe: {
            name: (digest_tokens if probe in ("prompts", "tokens") else digest_floats)(name, row)
            for name, row in rows.items()
        }
        for probe, rows in values.items()
    }
    weights = {"w": digest_floats("w", [1.0])}
    pushed = {"weights": weights, "sent": weights, "received": weights}
    update = {probe: weights for probe in ("loss", "grads", "grad_norm", "optimizer")}
    header = LedgerHeader(
        trajectory=trajectory_fingerprint(spec), plan="p", run_id="r", leg="a", start_step=0
    )
    ledger = LedgerWriter(leg, header=header)
    ledger.append(StepRecord(step=0, update=-1, digests=pushed))
    ledger.commit(1, "train_logprobs", roots_of(digests)["train_logprobs"])
    metrics = {
        "gate/logprob_abs_diff/max": gate.max_abs_diff,
        "gate/exact_fraction": gate.exact_fraction,
    }
    record = StepRecord(step=1, update=0, digests=digests | update | pushed, metrics=metrics)
    ledger.append(record, values=values)
    (leg / "spec.json").write_text(spec.model_dump_json())
    (leg / "environment.json").write_text(json.dumps({"trainer": {}, "rollout": {}}))
    rows = [
        {
            "step": 1,
            "request_id": name,
            "completion": text,
            "label": "2",
            "finish_reason": "length",
        }
        for name, text in zip(names, texts, strict=True)
    ]
    (leg / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def check(run: Path) -> subprocess.CompletedProcess[str]:
    # From another folder and isolated, so that nothing of this project can be imported.
    return subprocess.run(
        [sys.executable, "-I", str(CHECKER), str(run)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=run,
    )


@pytest.mark.parametrize(
    ("rollout", "trainer"),
    [
        ([[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.5]]),
        ([[NAN, -2.0], [-0.5]], [[-1.0, -2.5], [-0.5]]),
        ([[-1.0, -2.0], [-0.5]], [[-1.5, -2.0], [NAN]]),
        ([[-1.0, NAN], [-0.5]], [[-1.0, NAN], [-0.5]]),
        ([[-1.0, -INF], [-0.5]], [[-1.0, -INF], [-0.5]]),
        ([[0.0, -2.0], [-0.5]], [[-0.0, -2.0], [-0.5]]),
    ],
    ids=["none", "first", "last", "on both sides", "infinities", "signed zeros"],
)
def test_what_the_gate_found_is_found_again_with_a_nan(
    tmp_path: Path, rollout: list[list[float]], trainer: list[list[float]]
) -> None:
    write_run(tmp_path, rollout, trainer)
    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 gate figures" in done.stdout


def test_a_nan_in_place_of_a_figure_is_wrong(tmp_path: Path) -> None:
    write_run(tmp_path, [[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.5]])
    path = tmp_path / "a" / "ledger.jsonl"
    *lines, last = path.read_text().splitlines()
    row = json.loads(last)
    row["metrics"]["gate/logprob_abs_diff/max"] = "nan"
    path.write_text("\n".join([*lines, json.dumps(row)]) + "\n")
    done = check(tmp_path)
    assert done.returncode == 1
    assert "gate/logprob_abs_diff/max: recorded nan, derived 0.0" in done.stderr
