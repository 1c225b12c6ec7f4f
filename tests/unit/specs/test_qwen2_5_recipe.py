"""The 0.5B recipe has every hyper-parameter that its page says the reference runs have."""

from __future__ import annotations

import re
from pathlib import Path

from model_specs.fingerprint import flattened
from model_specs.registry import load_recipe

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "gpu.md"
ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| (\S+) \| .+ \|$", re.MULTILINE)


def test_every_row_of_the_page_is_the_value_of_the_recipe() -> None:
    spec = load_recipe("gsm8k_qwen2_5_0_5b")
    stated = dict(ROW.findall(PAGE.read_text(encoding="utf-8")))
    assert len(stated) > 30
    found = {name: str(value) for name, value in flattened(spec, part="identity").items()}
    assert {name: found[name] for name in stated} == stated


def test_the_evaluation_is_the_reference_runs() -> None:
    (chosen,) = load_recipe("gsm8k_qwen2_5_0_5b").plan.evals
    assert (chosen.split, chosen.every, chosen.before_training) == ("test", 20, True)
    assert (chosen.sampling.max_new_tokens, chosen.sampling.temperature) == (1024, 0.0)
