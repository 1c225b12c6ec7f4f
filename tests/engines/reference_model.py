"""A decoder in plain PyTorch, to check trainers against: one unpacked sequence, any float dtype.

Independent on purpose: nothing of `engines` and nothing of transformers. Gradients come from
autograd through textbook operations in the order that the architecture is written down in.

    weights = {name: tensor.double().requires_grad_() for name, tensor in masters.items()}
    logits = plain_logits(weights, ids, spec)          # [len(ids), vocabulary]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from model_specs.model_spec import ModelSpec, MoeModelSpec


def plain_logits(
    weights: Mapping[str, torch.Tensor], ids: torch.Tensor, spec: ModelSpec
) -> torch.Tensor:
    """Return the logits of every position of one sequence.

    Args:
        weights: Hugging Face name -> tensor.
        ids: int64 [n].
        spec: The model.
    """
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(spec.num_layers):
        part = {
            name.split(".", 3)[3]: tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = _norm(hidden, part["input_layernorm.weight"], spec)
        hidden = hidden + _attention(part, normed, spec)
        normed = _norm(hidden, part["post_attention_layernorm.weight"], spec)
        mixed = _mixture(part, normed, spec) if isinstance(spec, MoeModelSpec) else None
        hidden = hidden + (_mlp(part, "mlp.", normed) if mixed is None else mixed)
    tied = weights["model.embed_tokens.weight"]
    head = tied if spec.tie_word_embeddings else weights["lm_head.weight"]
    return F.linear(_norm(hidden, weights["model.norm.weight"], spec), head)


def _norm(x: torch.Tensor, weight: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + spec.rms_norm_eps)


def _mlp(part: Mapping[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate = F.linear(x, part[f"{prefix}gate_proj.weight"])
    up = F.linear(x, part[f"{prefix}up_proj.weight"])
    return F.linear(gate * torch.sigmoid(gate) * up, part[f"{prefix}down_proj.weight"])


def _mixture(part: Mapping[str, torch.Tensor], x: torch.Tensor, spec: MoeModelSpec) -> torch.Tensor:
    """Every expert on every row, times a weight that is zero for all but the chosen ones."""
    probabilities = torch.softmax(F.linear(x, part["mlp.gate.weight"]), -1)
    chosen, experts = probabilities.topk(spec.moe.experts_per_token, -1)
    if spec.moe.normalize_weights:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    weights = torch.zeros_like(probabilities).scatter(1, experts, chosen)
    outputs = [_mlp(part, f"mlp.experts.{e}.", x) for e in range(spec.num_experts)]
    return (torch.stack(outputs, 1) * weights[..., None]).sum(1)


def _attention(
    part: Mapping[str, torch.Tensor], hidden: torch.Tensor, spec: ModelSpec
) -> torch.Tensor:
    count, width = hidden.shape[0], spec.head_dim

    def heads(name: str) -> torch.Tensor:
        bias = part.get(f"self_attn.{name}_proj.bias")
        x = F.linear(hidden, part[f"self_attn.{name}_proj.weight"], bias).view(count, -1, width)
        if spec.qk_norm and name in "qk":
            x = _norm(x, part[f"self_attn.{name}_norm.weight"], spec)
        return (_rotated(x, spec) if name in "qk" else x).transpose(0, 1)

    group = spec.num_attention_heads // spec.num_key_value_heads
    q, k, v = heads("q"), heads("k"), heads("v")
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(1, 2) / width**0.5).masked_fill(future, float("-inf"))
    mixed = torch.softmax(scores, -1) @ v
    return F.linear(mixed.transpose(0, 1).reshape(count, -1), part["self_attn.o_proj.weight"])


def _rotated(x: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """[n, heads, width]: the pair (i, i + width / 2) turned by position * theta^(-2i / width)."""
    half = spec.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) * 2 / spec.head_dim
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * spec.rope_theta**-exponent
    cosine, sine = (f(angle)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
