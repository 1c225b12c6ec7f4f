"""Schedules beside the plain ones: stable for long with a short decay, and of the weight decay.

Both count samples, so they do not depend on how samples are cut into updates.

    --set schedule.kind=wsd --set schedule.horizon_samples=4096 --set schedule.decay_samples=512
    --set 'optimizer.weight_decay={"start": 0.0, "end": 0.1, "horizon_samples": 4096}'
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from model_specs.base import Frozen


class WsdSchedule(Frozen):
    """Warm-up, stable, decay (WSD): the full rate until a window before the horizon."""

    kind: Literal["wsd"] = "wsd"
    warmup_samples: int = Field(default=0, ge=0)
    horizon_samples: int = Field(default=0, ge=0)
    """Where decay ends."""
    decay_samples: int = Field(default=0, ge=0)
    """Length of the window of decay that ends at the horizon."""
    decay: Literal["linear", "cosine"] = "linear"
    min_lr: float = Field(default=0.0, ge=0)


class WeightDecaySchedule(Frozen):
    """Weight decay that moves from one value to another."""

    kind: Literal["linear", "cosine"] = "linear"
    start: float = Field(ge=0)
    end: float = Field(ge=0)
    horizon_samples: int = Field(ge=0)
    """Where `end` is reached; it stays from then on."""
