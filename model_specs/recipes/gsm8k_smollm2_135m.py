"""`gsm8k_smollm2_135m`: a real chat model of 135M parameters on GSM8K, sized for a CPU.

Two steps of 4 prompts x 4 samples. The model solves about one problem in a hundred, so a
well-formed final answer earns a declared part of the reward. Model and data are read from where
`--set model.path=FOLDER` and `--set data.source=FOLDER` point.
"""

from __future__ import annotations

from model_specs.model_spec import ModelSpec
from model_specs.run_spec import (
    DataSpec,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    TreeReduction,
)

SMOLLM2_135M = ModelSpec(
    family="llama",
    path="hf://HuggingFaceTB/SmolLM2-135M-Instruct@main",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qkv_bias=False,
    dtype="bfloat16",
)

TEMPLATE = (
    "{question}\n\nSolve the problem in a few short steps. Then write the final answer alone on "
    "the last line as a number after four hash signs, like this:\n#### 42"
)


def recipe() -> RunSpec:
    """Return the spec: 2 steps of 4 prompts x 4 samples of up to 128 tokens, bfloat16."""
    return RunSpec(
        recipe="gsm8k_smollm2_135m",
        model=SMOLLM2_135M,
        data=DataSpec(
            source="gsm8k",
            split="train",
            format="gsm8k",
            template=TEMPLATE,
            prompts_per_step=4,
            max_prompt_tokens=320,
        ),
        sampling=SamplingSpec(samples_per_prompt=4, max_new_tokens=128, temperature=1.0),
        reward=RewardSpec(name="gsm8k", format_credit=0.2),
        optimizer=OptimizerSpec(lr=1e-6),
        reduction=TreeReduction(slots=4),
        plan=PlanSpec(num_steps=2, checkpoint_every=1, keep_tensor_steps=0),
    )
