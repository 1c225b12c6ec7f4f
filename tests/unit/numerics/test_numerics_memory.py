"""Log-probs over a large vocabulary fit into a stated bound of memory, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

VOCABULARY, HIDDEN, ROWS = 151_936, 64, 1024
BOUND_MIB = 150
"""Above what is held before: float32 gradient of the head (37 MiB) and chunks of 64 rows."""

PROGRAM = """
import sys
import torch
from engines import numerics

vocabulary, hidden, rows, whole = map(int, sys.argv[1:])
torch.set_num_threads(1)


def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


states = torch.randn(rows, hidden, requires_grad=True)
weight = (torch.randn(vocabulary, hidden) / 8).requires_grad_()
ids = torch.arange(rows)
numerics.head_logprobs(states[:64], weight, ids[:64], temperature=1.0)[0].sum().backward()
weight.grad = states.grad = None
before = peak()
if whole:
    logprobs = numerics.chosen_logprobs(numerics.linear(states, weight), ids, temperature=1.0)
else:
    logprobs, entropy = numerics.head_logprobs(states, weight, ids, temperature=1.0)
logprobs.sum().backward()
print(peak() - before)
"""


def grown_mib(rows: int, *, whole: bool) -> float:
    """MiB by which the peak grows over that of one chunk of 64 rows, in a fresh process."""
    arguments = [VOCABULARY, HIDDEN, rows, int(whole)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="not run: peak memory is read in /proc"
)
def test_head_logprobs_of_a_150k_vocabulary_stay_within_the_bound() -> None:
    logits_mib = ROWS * VOCABULARY * 4 / 2**20
    assert logits_mib > 500  # what a whole matrix of logits would take, once
    assert grown_mib(ROWS, whole=False) < BOUND_MIB
    # The control: with the logits as a whole the bound is broken.
    assert grown_mib(ROWS, whole=True) > BOUND_MIB
