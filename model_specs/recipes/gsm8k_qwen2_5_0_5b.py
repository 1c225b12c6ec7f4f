"""`gsm8k_qwen2_5_0_5b`: Qwen2.5-0.5B on GSM8K with the settings of the public reference runs.

100 rollouts of 32 prompts x 8 samples of up to 1024 tokens, one optimizer step each: GRPO with
clip 0.2 and 0.28, per-token loss, KL to the reference reported at coefficient 0, AdamW 1e-6
constant, weight decay 0.1, betas 0.9 and 0.98, gradient norm clipped at 1.0. The reward compares
the last boxed answer as a string and then as an expression; the test split is evaluated greedily
before training and every 20 steps.
"""

from __future__ import annotations

from model_specs.model_spec import ModelSpec
from model_specs.run_spec import (
    DataSpec,
    EvalSampling,
    EvalSet,
    ExecutionSpec,
    LossSpec,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    SeedSpec,
    TreeReduction,
)
from model_specs.sources import GSM8K_SOURCE

QWEN2_5_0_5B = ModelSpec(
    family="qwen2",
    path="hf://Qwen/Qwen2.5-0.5B-Instruct@main",
    num_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=151936,
    max_position_embeddings=32768,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    dtype="bfloat16",
)

TEMPLATE = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."

EVALUATION = EvalSet(
    name="gsm8k",
    split="test",
    sampling=EvalSampling(max_new_tokens=1024, temperature=0.0),
    every=20,
    before_training=True,
)
"""Greedy, one sample a problem, before training and every 20 steps."""


def recipe() -> RunSpec:
    """Return the spec: 100 steps of 32 prompts x 8 samples of up to 1024 tokens, bfloat16."""
    return RunSpec(
        recipe="gsm8k_qwen2_5_0_5b",
        model=QWEN2_5_0_5B,
        data=DataSpec(
            source=GSM8K_SOURCE,
            split="train",
            format="gsm8k",
            template=TEMPLATE,
            shuffle=True,
            prompts_per_step=32,
            max_prompt_tokens=512,
        ),
        sampling=SamplingSpec(
            samples_per_prompt=8, max_new_tokens=1024, temperature=1.0, top_p=1.0, top_k=-1
        ),
        reward=RewardSpec(name="math"),
        loss=LossSpec(
            clip_low=0.2,
            clip_high=0.28,
            kl_coef=0.0,
            kl_type="k3",
            entropy_coef=0.0,
            reference=True,
            aggregation="per_token",
            advantage_eps=1e-6,
            normalize_std=True,
            updates_per_step=1,
        ),
        optimizer=OptimizerSpec(lr=1e-6, beta1=0.9, beta2=0.98, weight_decay=0.1, clip_grad=1.0),
        reduction=TreeReduction(slots=8),
        seeds=SeedSpec(root=1234),
        plan=PlanSpec(num_steps=100, checkpoint_every=20, evals=(EVALUATION,)),
        execution=ExecutionSpec(max_num_seqs=32, kv_cache_mib=1024, object_store_mib=2048),
    )
