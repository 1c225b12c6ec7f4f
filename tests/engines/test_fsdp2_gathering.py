"""How often FSDP2 makes the gathered copy of the weights, which no digest shows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from model_specs.families.decoder import parameter_shapes
from model_specs.run_spec import TreeReduction
from model_specs.trainer_options import TrainerOptions
from tests.engines.trainer_cases import QWEN2, made_samples, make_spec, started, write_model

SLOTS = 4
NUM_TENSORS = len(parameter_shapes(QWEN2))


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 1), (True, 2 * SLOTS)])
def test_one_rank_gathers_once_for_all_slots_and_frees_the_copy_at_the_end(
    checkpointing: bool, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpointing, which is for little memory, once a forward and once a backward."""
    spec = make_spec("bfloat16").model_copy(
        update={
            "reduction": TreeReduction(slots=SLOTS),
            "trainer_options": TrainerOptions(gradient_checkpointing=checkpointing),
        }
    )
    gathered: list[FSDPParam] = []
    honest = FSDPParam.to_unsharded

    def counted(self: FSDPParam) -> None:
        gathered.append(self)
        honest(self)

    with started(spec, write_model(tmp_path / "qwen2", QWEN2), tmp_path) as trainer:
        trainer.score(made_samples())
        monkeypatch.setattr(FSDPParam, "to_unsharded", counted)
        trainer.update(made_samples(), step=1, update=0)
    counts = Counter(gathered)
    assert len(counts) == NUM_TENSORS
    assert set(counts.values()) == {times}
    assert {parameter.sharded_state.name for parameter in counts} == {"SHARDED"}
