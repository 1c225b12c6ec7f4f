"""`tiny_cpu`: the demo. A generated two-layer model learns to write digits within seconds.

The model and its arithmetic prompts come from fixed seeds, so nothing is downloaded. Sizes are
uneven on purpose (176 is not a power of two, 4 heads share 2 key-value heads, 100 tokens are
padded by vLLM), so that a wrong stride, order or padding shows; 32 is the smallest head size of
vLLM's CPU attention.
"""

from __future__ import annotations

from model_specs.model_spec import ModelSpec
from model_specs.run_spec import (
    DataSpec,
    LossSpec,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    TreeReduction,
)

TINY_MODEL = ModelSpec(
    family="qwen2",
    path="generated:tiny",
    num_layers=2,
    hidden_size=128,
    intermediate_size=176,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=100,
    max_position_embeddings=256,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    dtype="bfloat16",
)
"""Facts of the generated model; its vocabulary is 96 characters and 4 special tokens."""

LEARNING_THRESHOLD = 0.3
"""Mean reward of steps 6 to 8 over three root seeds: the recipe is above, both controls are below.

The controls are `loss.advantage_transform` `shuffled` and `sign_flipped`. The untrained model earns
about 0.1.
"""


def recipe() -> RunSpec:
    """Return the spec: 8 steps of 4 prompts x 8 samples of up to 24 tokens, bfloat16."""
    return RunSpec(
        recipe="tiny_cpu",
        model=TINY_MODEL,
        data=DataSpec(
            source="generated:arithmetic",
            prompts_per_step=4,
            max_prompt_tokens=96,
            duplicates="keep",  # The generator draws with replacement: four questions come twice.
        ),
        sampling=SamplingSpec(samples_per_prompt=8, max_new_tokens=24, temperature=1.0),
        reward=RewardSpec(name="digits"),
        loss=LossSpec(reference=True),
        optimizer=OptimizerSpec(lr=5e-3, weight_decay=0.0),
        reduction=TreeReduction(slots=4),
        plan=PlanSpec(num_steps=8, checkpoint_every=4, keep_tensor_steps=8),
    )
