"""The two controls beside a log-prob gate of 0.0, so that the zero can be believed.

1. *Native*: vLLM on its own ops draws from the same weights, and the trainer scores those tokens.
   If this too were exactly equal, the gate could not tell aligned from unaligned engines.
2. *Stock*: plain transformers (eager attention) scores the tokens that our vLLM drew. If that were
   far away, a bug in a shared op would hide behind the equality of two engines that both have it.
   In float32 the largest difference is bounded by the plan; in bfloat16 the mean one by what native
   vLLM itself differs from stock transformers by, in the same run, times `STOCK_BAND_FACTOR`.

`stock_logprobs` runs in an engine's process; the judges are free of torch and run in the driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engines.contracts import Sample
from engines.gates.logprobs import StepGate, compare_logprobs
from model_specs.errors import SpecError

STOCK_BAND_FACTOR = 1.5
"""bfloat16: the two means are over different tokens, so ours may exceed native vLLM's a little.

Means, since the largest of a few hundred rounding errors varies by more from draw to draw.
"""

Scores = Mapping[str, Sequence[float]]
"""Request id -> log-prob (nats) of each sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """One control: whether it showed what it has to show, and by how much."""

    name: Literal["native", "stock"]
    holds: bool
    reason: str
    num_tokens: int
    max_abs_diff: float
    """Nats."""
    mean_abs_diff: float
    """Nats."""
    exact_fraction: float
    bound: float | None
    """Stock: largest difference allowed in float32, mean one in bfloat16, in nats; native: None."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; floats that JSON lacks as `nan`, `inf`, `-inf`."""
        return {
            name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def stock_logprobs(
    model_dir: str,
    samples: Sequence[Sample],
    *,
    temperature: float,
    dtype: Literal["float32", "bfloat16"],
) -> dict[str, list[float]]:
    """Score sampled tokens with plain transformers, one sequence a forward.

    Args:
        model_dir: Exported folder with the weights that sampled.
        samples: Prompts and sampled tokens.
        temperature: `log_softmax(float32(logits) / temperature)`, as processed log-probs are
            defined; over the tokens that were not forbidden.
        dtype: Dtype of weights and activations.

    Returns:
        Request id -> log-prob (float32 value, nats) of each sampled token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    model.eval().to(device)
    scores: dict[str, list[float]] = {}
    with torch.inference_mode():
        for sample in samples:
            ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids], device=device)
            # The row before a token predicts it; the last row predicts nothing that was drawn.
            first = len(sample.prompt_token_ids) - 1
            logits = model(ids[None], use_cache=False).logits[0, first:-1].float()
            logits[: sample.forbidden_until, list(sample.forbidden_ids)] = -torch.inf
            rows = torch.log_softmax(logits / temperature, dim=-1)
            chosen = rows.gather(1, ids[first + 1 :, None])[:, 0]
            scores[sample.request_id] = chosen.tolist()
    return scores


def judge_native(native: Sequence[Sample], trainer: Scores) -> ControlResult:
    """Hold unless the trainer's scores of native vLLM's tokens are exactly native vLLM's own.

    Args:
        native: What a native engine drew.
        trainer: The aligned trainer's scores of the same tokens, at the same weights.
    """
    gate = compare_logprobs(0, native, trainer)
    figures = f"max {gate.max_abs_diff!r} over {gate.num_tokens} tokens"
    if gate.faults or not gate.num_tokens:
        return _result("native", gate, None, holds=False, reason=_not_compared(gate))
    if gate.num_exact == gate.num_tokens:
        reason = (
            f"native ops are exactly equal too ({figures}): the gate cannot tell the difference"
        )
        return _result("native", gate, None, holds=False, reason=reason)
    share = f"{gate.exact_fraction:.1%} exactly equal"
    return _result(
        "native", gate, None, holds=True, reason=f"native ops differ: {figures}, {share}"
    )


def judge_stock(
    samples: Sequence[Sample],
    stock: Scores,
    *,
    dtype: Literal["float32", "bfloat16"],
    band_float32: float,
    native: tuple[Sequence[Sample], Scores] | None = None,
) -> ControlResult:
    """Hold when our vLLM is as near to stock transformers as it has to be.

    Args:
        samples: What our vLLM drew, with its log-probs.
        stock: `stock_logprobs` of them.
        dtype: Dtype of both.
        band_float32: Bound in nats for float32 (`plan.gates.stock_band_float32`).
        native: For bfloat16: what native vLLM drew in the same run, and `stock_logprobs` of that.

    Raises:
        SpecError: The dtype is bfloat16 and no native samples are given to take the bound from.
    """
    gate = compare_logprobs(0, samples, stock)
    if dtype == "float32":
        kind, found = "max", gate.max_abs_diff
        bound, origin = band_float32, "plan.gates.stock_band_float32"
    elif native is None:
        raise SpecError(
            "the stock control in bfloat16 takes its bound from native vLLM in the same run; give "
            "its samples and their stock scores"
        )
    else:
        band = compare_logprobs(0, *native)
        if band.faults or not band.num_tokens:
            return _result("stock", gate, None, holds=False, reason=_not_compared(band))
        kind, found = "mean", gate.mean_abs_diff
        bound = band.mean_abs_diff * STOCK_BAND_FACTOR
        origin = f"{STOCK_BAND_FACTOR} x native vLLM's own {band.mean_abs_diff!r}"
    if gate.faults or not gate.num_tokens:
        return _result("stock", gate, bound, holds=False, reason=_not_compared(gate))
    # A NaN is within no bound.
    holds = found <= bound
    reason = (
        f"{kind} {found!r} over {gate.num_tokens} tokens is "
        f"{'within' if holds else 'NOT within'} {bound!r} ({origin})"
    )
    return _result("stock", gate, bound, holds=holds, reason=reason)


def _not_compared(gate: StepGate) -> str:
    return f"could not be compared: {'; '.join(gate.faults) or 'no token was drawn'}"


def _result(
    name: Literal["native", "stock"],
    gate: StepGate,
    bound: float | None,
    *,
    holds: bool,
    reason: str,
) -> ControlResult:
    return ControlResult(
        name=name,
        holds=holds,
        reason=reason,
        num_tokens=gate.num_tokens,
        max_abs_diff=gate.max_abs_diff,
        mean_abs_diff=gate.mean_abs_diff,
        exact_fraction=gate.exact_fraction,
        bound=bound,
    )
