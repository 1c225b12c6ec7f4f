"""`gsm8k_smollm2_135m`: a real chat model of 135M parameters on GSM8K, sized for a CPU.

Two steps of 4 prompts x 4 samples. The model solves about one problem in a hundred, so a
well-formed final answer earns a declared part of the reward. Model and data are downloaded; without
a network `--set model.path=FOLDER` and `--set data.source=FOLDER` name local ones.
"""

from __future__ import annotations

from model_specs.model_spec import ModelSpec
from model_specs.run_spec import (
    DataSpec,
    ExecutionSpec,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    TreeReduction,
)
from model_specs.sources import GSM8K_SOURCE

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
    "Question: Tom has 3 apples and buys 2 more. How many apples does he have?\n"
    "Answer: 3 + 2 = 5\n#### 5\n\n"
    "Answer the next question in the same way: one short line of arithmetic, then the final "
    "number after four hash signs.\n\nQuestion: {question}"
)
"""One worked example: without it the model seldom writes a final answer at all."""

PROMPT_IDS = (
    "train-0",
    "train-4",
    "train-5",
    "train-6",
    "train-12",
    "train-20",
    "train-21",
    "train-25",
)
"""Frozen: the first eight problems that qualified in a screening whose rule was written before.

The rule is in `tools/screen_prompts.py`; what each problem earned and the digests of its tokens are
in docs/measurements/2026-11-29-gsm8k-smollm2-135m-screening.json.
"""


def recipe() -> RunSpec:
    """Return the spec: 2 steps of 4 prompts x 4 samples of up to 128 tokens, bfloat16."""
    return RunSpec(
        recipe="gsm8k_smollm2_135m",
        model=SMOLLM2_135M,
        data=DataSpec(
            source=GSM8K_SOURCE,
            split="train",
            digest="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
            format="gsm8k",
            template=TEMPLATE,
            prompt_ids=PROMPT_IDS,
            shuffle=False,
            prompts_per_step=4,
            max_prompt_tokens=320,
        ),
        sampling=SamplingSpec(samples_per_prompt=4, max_new_tokens=128, temperature=0.7),
        reward=RewardSpec(name="gsm8k", format_credit=0.2),
        optimizer=OptimizerSpec(lr=1e-6),
        reduction=TreeReduction(slots=4),
        plan=PlanSpec(num_steps=2, checkpoint_every=1, keep_tensor_steps=0),
        # 22.5 KiB of keys and values a token: room for a step's 16 sequences of 448 tokens at once.
        execution=ExecutionSpec(max_num_seqs=16, kv_cache_mib=192),
    )
