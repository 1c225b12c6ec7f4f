"""The stock numerics of the trainer: transformers' own eager forward, over the samples of one slot.

For comparison with the aligned numerics, and for corrections of the mismatch that then exists. Only
the forward and its backward are stock; slots, reduction, norm, clip and AdamW are those of every
run. Nothing here promises that a row's bits do not depend on its batch.

    stock_forward(model, temperature=spec.sampling.temperature)
    logprobs, entropy = model(slot)      # float32 [T] each, T = slot.num_tokens
"""

from __future__ import annotations

import types
from typing import Any

import torch

from engines import numerics
from engines.train.slots import PackedSlot


def stock_forward(model: torch.nn.Module, *, temperature: float) -> None:
    """Let `model(slot)` run transformers' forward on the slot's sequences as one padded batch.

    The model's rotary module is made anew: `build_model` leaves it out, since the shared op needs
    none. Afterwards `model(slot)` returns (log-probs, entropy), float32 [T] each, under
    softmax(float32(logits) / temperature).
    """
    decoder: Any = model.get_submodule("model")
    device = next(model.parameters()).device
    decoder.rotary_emb = _rotary_class(decoder)(config=decoder.config).to(device)
    decoder.config._attn_implementation = "eager"
    original = type(model).forward

    def forward(self: Any, slot: PackedSlot) -> tuple[torch.Tensor, torch.Tensor]:
        slot = slot.to(self.lm_head.weight.device)
        ids, mask = _as_batch(slot)
        output = original(self, input_ids=ids, attention_mask=mask, use_cache=False)
        rows = output.logits[mask.bool()].index_select(0, _row_of_token(slot))
        rows = numerics.forbid_(rows, slot.forbidden, slot.head_rows)
        logprobs = torch.log_softmax(rows.float() / temperature, dim=-1)
        chosen = slot.targets.index_select(0, slot.head_rows)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, chosen[:, None])[:, 0].cpu(), entropy.cpu()

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]


def _rotary_class(decoder: Any) -> Any:
    """Return the rotary class of the decoder's own family, from the module that defines it."""
    import sys

    module = sys.modules[type(decoder).__module__]
    name = type(decoder).__name__.removesuffix("Model") + "RotaryEmbedding"
    return getattr(module, name)


def _as_batch(slot: PackedSlot) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, int64 [sequences, longest], padded on the right."""
    shape = (len(slot.lengths), max(slot.lengths))
    ids, mask = slot.ids.new_zeros(shape), slot.ids.new_zeros(shape)
    for row, (start, length) in enumerate(zip(slot.starts, slot.lengths, strict=True)):
        ids[row, :length] = slot.ids[start : start + length]
        mask[row, :length] = 1
    return ids, mask


def _row_of_token(slot: PackedSlot) -> torch.Tensor:
    """Return, for each scored token, its row among the slot's rows without padding, int64 [T]."""
    return (~slot.padding).cumsum(0).index_select(0, slot.scored_rows) - 1
