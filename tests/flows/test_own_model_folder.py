"""A run from a model folder of another width than any recipe's is Aligned at exactly 0.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.checkpoint.tiny_model import write_tiny_model
from engines.provenance.ledger import read_ledger
from engines.runs import read_spec
from model_specs.json_text import read_json
from model_specs.registry import load_recipe, model_from
from tests.flows.command_line import CommandLine

TINY = load_recipe("tiny_cpu").model
OTHERS = {
    "qwen2": {
        **{"num_layers": 3, "hidden_size": 96, "intermediate_size": 160, "vocab_size": 104},
        **{"num_attention_heads": 3, "num_key_value_heads": 1, "rope_theta": 1e6},
    },
    "qwen3": {
        **{"num_layers": 1, "hidden_size": 160, "intermediate_size": 224, "vocab_size": 131},
        # As in Qwen3's small models, heads x head_dim is not the hidden size.
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64},
        **{"qkv_bias": False, "qk_norm": True, "tie_word_embeddings": False},
    },
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", OTHERS)
def test_a_run_from_a_folder_of_another_width_is_aligned_at_zero(
    family: str, lockstep: CommandLine, tmp_path: Path
) -> None:
    model = TINY.model_copy(update={"family": family, **OTHERS[family]})
    write_tiny_model(tmp_path, model, seed=5)
    assert model_from(str(tmp_path)) == model.model_copy(update={"path": str(tmp_path)})
    settings = (f"model.path={tmp_path}", "plan.num_steps=1", "plan.checkpoint_every=1")
    ended = lockstep(
        *("run", "tiny_cpu", "--run-id", f"own-{family}"),
        *(part for setting in settings for part in ("--set", setting)),
        *("--set", "plan.gates.controls=off"),
    )
    assert ended.code == 0, ended
    folder = lockstep.runs_dir / f"own-{family}"
    used = read_spec(folder).model
    assert (used.family, used.hidden_size) == (family, model.hidden_size)
    assert read_json(folder / "verdict.json")["verdict"] == "Aligned"
    gates = read_json(folder / "a" / "gates.json")
    assert {gates[name]["verdict"] for name in ("preflight", "logprobs", "layerwise")} == {
        "Aligned"
    }
    first, last = read_ledger(folder / "a").lines
    assert last.metrics["gate/logprob_abs_diff/max"] == 0.0
    assert last.metrics["gate/num_tokens"] > 100
    assert first.roots["received"] != last.roots["received"]  # the update is in the rollout, too
