"""The frozen prompts of `gsm8k_smollm2_135m` are what the committed screening chose by its rule."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines.data import prompt_order
from engines.seeds import derive_seed
from model_specs.errors import SpecError
from model_specs.registry import check_config, load_recipe
from model_specs.run_spec import RunSpec

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "docs/measurements/2026-11-29-gsm8k-smollm2-135m-screening.json"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return load_recipe("gsm8k_smollm2_135m")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The screening tool, which is a script and no package."""
    script = ROOT / "tools/screen_prompts.py"
    place = importlib.util.spec_from_file_location("screen_prompts", script)
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules[place.name] = module  # dataclasses look their module up
    place.loader.exec_module(module)
    return module


def test_the_recipe_names_the_prompts_that_the_screening_chose(
    spec: RunSpec, record: dict[str, Any]
) -> None:
    assert spec.data.prompt_ids == tuple(record["chosen"])
    assert spec.data.digest == record["data_sha256"]


def test_the_rule_chooses_the_same_prompts_from_the_recorded_rewards(
    spec: RunSpec, record: dict[str, Any], tool: ModuleType
) -> None:
    assert record["rule"] == tool.RULE
    varying = [row["prompt_id"] for row in record["prompts"] if tool.qualifies(row["rewards"])]
    assert varying[: spec.plan.num_steps * spec.data.prompts_per_step] == record["chosen"]
    assert {len(row["rewards"]) for row in record["prompts"]} == {tool.NUM_SAMPLES}


def test_the_recorded_prompts_are_in_file_order_from_the_first_row_on(
    record: dict[str, Any], tool: ModuleType
) -> None:
    rows = [int(row["prompt_id"].removeprefix("train-")) for row in record["prompts"]]
    assert rows == sorted(set(rows))
    assert rows[0] >= 0
    assert rows[-1] < tool.NUM_ROWS
    assert len(rows) + record["dropped_too_long"] == tool.NUM_ROWS


def test_the_screening_used_the_recipes_own_template_sampling_and_reward(
    spec: RunSpec, record: dict[str, Any]
) -> None:
    assert record["template"] == spec.data.template
    for part in ("sampling", "reward"):
        current = getattr(spec, part).model_dump(mode="json")
        recorded = record[part]
        assert recorded == {name: current[name] for name in recorded}
    assert record["seeds"]["root"] == spec.seeds.root


def test_the_steps_of_the_recipe_take_each_chosen_prompt_once_in_order(spec: RunSpec) -> None:
    count = len(spec.data.prompt_ids)
    taken = [i for step in (1, 2) for i in prompt_order(count, spec, step)]
    assert taken == list(range(8))


def test_no_seed_of_the_screening_is_a_seed_of_training(spec: RunSpec, tool: ModuleType) -> None:
    root = spec.seeds.root
    names = [(name, index) for name in spec.data.prompt_ids for index in range(tool.NUM_SAMPLES)]
    screened = {derive_seed(root, tool.SEED_LABEL, *name) for name in names}
    trained = {derive_seed(root, "sample", step, *name) for name in names for step in (1, 2)}
    assert len(screened) == len(names)
    assert not screened & trained


@pytest.mark.parametrize(
    ("rewards", "varies"),
    [
        ([0.0] * 8, False),
        ([0.2] + [0.0] * 7, False),
        ([0.2, 1.0] + [0.0] * 6, False),
        ([0.2, 1.0, 0.2] + [0.0] * 5, True),
        ([0.2] * 4 + [0.0] * 4, True),
        ([0.0] + [1.0] * 7, False),
    ],
)
def test_a_prompt_qualifies_when_three_samples_leave_the_majority(
    tool: ModuleType, rewards: list[float], varies: bool
) -> None:
    assert tool.qualifies(rewards) is varies


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
}
"""What a folder that was converted from another format says; its epsilon went through float32."""


def test_an_epsilon_that_is_the_same_float32_is_the_same_epsilon(spec: RunSpec) -> None:
    check_config(spec.model, CONFIG)


def test_an_epsilon_that_is_the_next_float32_is_another_one(spec: RunSpec) -> None:
    with pytest.raises(SpecError, match="rms_norm_eps: spec 1e-05"):
        check_config(spec.model, CONFIG | {"rms_norm_eps": 1.0000000656873453e-05})
