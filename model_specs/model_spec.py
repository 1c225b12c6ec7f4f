"""`ModelSpec`: the architecture facts that decide bits, checked against a folder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from model_specs.base import Execution, Frozen

MOE_FAMILIES = ("qwen3_moe",)
"""Families whose layers are mixtures of experts."""


class ModelSpec(Frozen):
    """A decoder-only language model of a known family."""

    family: Literal["qwen2", "llama", "qwen3", "qwen3_moe"]
    path: Execution[str]
    """`generated:tiny`, a folder, or `hf://org/name@revision`; weights are identity by digest."""
    weights_digest: str | None = None
    """Digest of the weights' manifest; None only until `resolve` has filled it in."""
    tokenizer_digest: str | None = None
    """Digest of tokenizer files and chat template; None only until `resolve` has filled it in."""
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    rope_theta: float = Field(gt=0)
    rope_scaling: str | None = None
    """Canonical JSON of a rope scaling other than the default; None for the default."""
    rms_norm_eps: float = Field(gt=0)
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool = False
    """RMSNorm with a learned weight of `head_dim` on every query and key head, before the rope."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype in which the folder stores the weights."""

    @property
    def num_experts(self) -> int:
        """Experts of each layer; 0 for a dense model."""
        return 0

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; the rope turns pairs")
        return self

    @model_validator(mode="after")
    def _experts_fit_the_family(self) -> Self:
        if (self.family in MOE_FAMILIES) != (self.num_experts > 0):
            raise ValueError(
                f"family {self.family} with {self.num_experts} experts: set model.moe for "
                f"{', '.join(MOE_FAMILIES)} and for no other family"
            )
        return self


class MoeSpec(Frozen):
    """The experts of a layer whose MLP is a mixture."""

    num_experts: int = Field(ge=2)
    experts_per_token: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    """Of one expert."""
    normalize_weights: bool
    """Divide the chosen experts' probabilities by their sum (`norm_topk_prob`)."""

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} of num_experts={self.num_experts}"
            )
        return self


class MoeModelSpec(ModelSpec):
    """A decoder of which every layer's MLP is a mixture of experts.

    A class of its own, so that the identity of a dense model has no fields of experts.
    """

    moe: MoeSpec

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return self.moe.num_experts


def _kind(value: Any) -> str:
    """Say which class a value is of, so that an error is about that class alone."""
    if isinstance(value, Mapping):
        return "moe" if "moe" in value else "dense"
    return "moe" if isinstance(value, MoeModelSpec) else "dense"


AnyModelSpec = Annotated[
    Annotated[MoeModelSpec, Tag("moe")] | Annotated[ModelSpec, Tag("dense")], Discriminator(_kind)
]
"""What `RunSpec.model` holds."""
