"""The group's recipe: a small Llama of its own, its own questions, its own reward."""

from __future__ import annotations

from pathlib import Path

from model_specs.registry import model_from
from model_specs.run_spec import (
    DataSpec,
    EvalSampling,
    EvalSet,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    TreeReduction,
)

HERE = Path(__file__).parent
QUESTIONS = str(HERE / "train.parquet")


def recipe() -> RunSpec:
    """Return the spec: six steps with a checkpoint every second one, and an evaluation.

    Step 5 takes the last two questions of the first epoch and the first two of the second.
    """
    held_out = EvalSet(
        name="held_out",
        source=QUESTIONS,
        rows="48:56",
        every=3,
        sampling=EvalSampling(max_new_tokens=8),
    )
    return RunSpec(
        recipe="my_lab",
        model=model_from(str(HERE / "model")),
        data=DataSpec(
            source=QUESTIONS,
            rows="0:18",
            last_batch="carry",
            format="prompt",
            prompt_key="question",
            label_key="answer",
            metadata_key="about",
            template="Compute {question}",
            prompts_per_step=4,
            max_prompt_tokens=64,
        ),
        sampling=SamplingSpec(samples_per_prompt=4, max_new_tokens=16, temperature=1.0),
        reward=RewardSpec(name="my_lab.rewards:score"),
        optimizer=OptimizerSpec(lr=4e-3),
        reduction=TreeReduction(slots=2),
        plan=PlanSpec(num_steps=6, checkpoint_every=2, keep_tensor_steps=6, evals=(held_out,)),
    )
