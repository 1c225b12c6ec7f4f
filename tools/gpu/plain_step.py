"""A training step as a stock trainer takes it: the denominator of the cost of exactness.

transformers' own model with scaled-dot-product attention over a padded batch, float32 weights under
bfloat16 autocast, torch's fused AdamW; no deterministic algorithms, no evidence. The same samples
in the same slots, scored and trained on once a round, loss `-advantage * ratio`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from engines.contracts import TrainSample
from model_specs.run_spec import RunSpec


def run(spec_json: str, samples: list[TrainSample], rounds: int) -> dict[str, Any]:
    """Return medians of `score_s` and `update_s` over `rounds`, after one that is not counted."""
    import torch
    from transformers import AutoModelForCausalLM

    from engines.train.fsdp2.model import model_config
    from engines.train.slots import pack_slot, plan_slots

    spec = RunSpec.model_validate_json(spec_json)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            model_config(spec.model), dtype=torch.float32, attn_implementation="sdpa"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    indices = plan_slots(len(samples), num_slots=spec.reduction.slots)
    slots = [pack_slot([samples[index] for index in slot]) for slot in indices]
    advantages = [
        torch.tensor([samples[index].advantage for index in slot], device="cuda")
        for slot in indices
    ]
    times: dict[str, list[float]] = {"score_s": [], "update_s": []}
    for number in range(rounds + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.no_grad():
            old = [logprobs(model, slot) for slot in slots]
        torch.cuda.synchronize()
        scored = time.perf_counter()
        for slot, before, advantage in zip(slots, old, advantages, strict=True):
            counts = torch.tensor(slot.counts, device="cuda")
            ratio = (logprobs(model, slot) - before).exp()
            (-(advantage.repeat_interleave(counts) * ratio).mean() / len(slots)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if number:
            times["score_s"].append(scored - begun)
            times["update_s"].append(time.perf_counter() - scored)
    return {name: round(statistics.median(values), 4) for name, values in times.items()} | {
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20
    }


def logprobs(model: Any, slot: Any) -> Any:
    """Return the log-probs of a slot's completion tokens, float32 [T]."""
    import torch

    from engines.train.fsdp2.stock import _as_batch, _row_of_token

    slot = slot.to(torch.device("cuda"))
    ids, mask = _as_batch(slot)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        rows = hidden[mask.bool()].index_select(0, _row_of_token(slot))
        logits = model.lm_head(rows)
    targets = slot.targets.index_select(0, slot.head_rows)
    return torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None])[:, 0]
