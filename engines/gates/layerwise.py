"""The layer-wise gate: every decoder layer's hidden state, bit for bit, in trainer and rollout.

The log-prob gate sees a layer only through the head. Here both engines write the output of every
decoder layer at every position of some requests, and all elements are compared. Invariants: both
sides must have exactly the requests that were asked for, every layer of the model and the same
positions, from the first prompt token on
(prefill) to the last token that was fed back (decode); an element that is not finite is never
equal; the first difference is named by the earliest layer, then request, position and channel.

Recording runs in the engines' processes and goes through a folder; the comparison is numpy.

    samples = engine.layer_states(requests, folder)     # <folder>/rollout.safetensors
    trainer.layer_states(samples, folder)               # <folder>/trainer.safetensors
    result = compare_layers(
        folder,
        {r.request_id: len(r.prompt_token_ids) for r in requests},
        num_layers=spec.model.num_layers,
    )
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from engines.contracts import Sample, SampleRequest
from engines.provenance.verdict import Verdict
from model_specs.errors import EngineError

if TYPE_CHECKING:
    import torch

ROLLOUT_FILE, TRAINER_FILE = "rollout.safetensors", "trainer.safetensors"
MORE = "states, but was not asked for it"

Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """The first element that differs or is not finite."""

    layer: int
    request_id: str
    position: int
    """0-based in the sequence of prompt and completion."""
    phase: Literal["prefill", "decode"]
    channel: int
    rollout: float
    trainer: float

    def describe(self) -> str:
        """Say where, and both values."""
        return (
            f"layer {self.layer}, {self.request_id} position {self.position} ({self.phase}) "
            f"channel {self.channel}: rollout {self.rollout!r}, trainer {self.trainer!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseResult:
    """What was compared and what was found."""

    verdict: Verdict
    reason: str
    num_requests: int
    num_layers: int
    num_prefill_positions: int
    num_decode_positions: int
    num_elements: int
    num_exact: int
    differing_layers: tuple[int, ...]
    first: LayerDifference | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; floats that JSON lacks as text."""
        values = asdict(self) | {"verdict": str(self.verdict)}
        if self.first is not None:
            values["first"] = asdict(self.first) | {
                side: repr(getattr(self.first, side)) for side in ("rollout", "trainer")
            }
        return values


def compare_layers(
    folder: str | Path, prompt_lengths: Mapping[str, int], *, num_layers: int
) -> LayerwiseResult:
    """Compare what both engines wrote into `folder`.

    Args:
        folder: Holds both files, request id -> `[layers, positions, hidden]`.
        prompt_lengths: Request id -> number of prompt tokens, of every request that was asked for.
        num_layers: Decoder layers of the model; both sides must have recorded all of them.
    """
    rollout = read_states(Path(folder) / ROLLOUT_FILE)
    trainer = read_states(Path(folder) / TRAINER_FILE)
    faults = [
        f"{name}: {where} has {'no states' if name in prompt_lengths else MORE}"
        for where, states in (("rollout", rollout), ("trainer", trainer))
        for name in sorted(prompt_lengths.keys() ^ states.keys())
    ]
    common = [name for name in prompt_lengths if name in rollout and name in trainer]
    faults += [
        f"{name}: rollout has {rollout[name].dtype} {rollout[name].shape} [layers, positions, "
        f"hidden], trainer {trainer[name].dtype} {trainer[name].shape}"
        for name in common
        if (rollout[name].shape, rollout[name].dtype) != (trainer[name].shape, trainer[name].dtype)
    ]
    faults += [
        f"{name}: rollout recorded {len(rollout[name])} layers and trainer {len(trainer[name])}, "
        f"but the model has {num_layers}"
        for name in common
        if {len(rollout[name]), len(trainer[name])} != {num_layers}
    ]
    if faults:
        return _result(Verdict.MISALIGNED, "; ".join(faults))
    return _compare(rollout, trainer, prompt_lengths, num_layers)


def _compare(
    rollout: Mapping[str, Bits],
    trainer: Mapping[str, Bits],
    prompt_lengths: Mapping[str, int],
    num_layers: int,
) -> LayerwiseResult:
    prefill = decode = elements = exact = 0
    differing: set[int] = set()
    first: LayerDifference | None = None
    for name, prompt in prompt_lengths.items():
        ours, theirs = rollout[name], trainer[name]
        prefill += min(prompt, ours.shape[1])
        decode += max(0, ours.shape[1] - prompt)
        same = (ours == theirs) & _finite(ours)
        elements += same.size
        exact += int(same.sum())
        wrong = np.argwhere(~same)
        differing |= {int(layer) for layer in np.unique(wrong[:, 0])}
        if len(wrong) and (first is None or int(wrong[0, 0]) < first.layer):
            layer, position, channel = (int(index) for index in wrong[0])
            first = LayerDifference(
                layer=layer,
                request_id=name,
                position=position,
                phase="prefill" if position < prompt else "decode",
                channel=channel,
                rollout=_value(ours[layer, position, channel]),
                trainer=_value(theirs[layer, position, channel]),
            )
    counts = {
        "num_requests": len(prompt_lengths),
        "num_layers": num_layers,
        "num_prefill_positions": prefill,
        "num_decode_positions": decode,
        "num_elements": elements,
        "num_exact": exact,
        "differing_layers": tuple(sorted(differing)),
        "first": first,
    }
    if first is not None:
        return _result(Verdict.MISALIGNED, first.describe(), **counts)
    if not prefill or not decode or not elements:
        return _result(
            Verdict.VACUOUS,
            f"{prefill} prefill and {decode} decode positions were compared; both are needed",
            **counts,
        )
    reason = (
        f"{elements} elements of {num_layers} layers equal, {prefill} prefill and {decode} decode "
        f"positions of {len(prompt_lengths)} requests"
    )
    return _result(Verdict.ALIGNED, reason, **counts)


def _result(verdict: Verdict, reason: str, **counts: Any) -> LayerwiseResult:
    empty: dict[str, Any] = {
        "num_requests": 0,
        "num_layers": 0,
        "num_prefill_positions": 0,
        "num_decode_positions": 0,
        "num_elements": 0,
        "num_exact": 0,
        "differing_layers": (),
        "first": None,
    }
    return LayerwiseResult(verdict=verdict, reason=reason, **{**empty, **counts})


def _finite(bits: Bits) -> npt.NDArray[np.bool_]:
    """Whether an element's exponent is not all ones; uint16 is bfloat16, uint32 float32."""
    mask = bits.dtype.type(0x7F80 if bits.dtype == np.uint16 else 0x7F800000)
    return (bits & mask) != mask


def _value(bits: np.uint16 | np.uint32) -> float:
    word = np.uint32(bits) << np.uint32(16) if bits.dtype == np.uint16 else np.uint32(bits)
    return float(np.array([word], dtype=np.uint32).view(np.float32)[0])


def read_states(path: Path) -> dict[str, Bits]:
    """Return request id -> bit patterns `[layers, positions, hidden]`.

    Raises:
        EngineError: The file is not there.
    """
    from safetensors.numpy import load_file

    if not path.is_file():
        raise EngineError(f"{path} is missing: an engine recorded no states")
    states: dict[str, Bits] = load_file(path)
    return states


def write_states(path: Path, states: Mapping[str, torch.Tensor]) -> None:
    """Write bit patterns of bfloat16 or float32 states, so that the reader needs no torch."""
    import torch
    from safetensors.torch import save_file

    containers = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous().view(containers[t.dtype]) for name, t in states.items()}, path)


@contextmanager
def recorded(layers: Sequence[torch.nn.Module]) -> Iterator[list[list[torch.Tensor]]]:
    """Collect the output `[rows, hidden]` of each layer, a list a layer, while the block lasts.

    A layer returns its hidden state, or a tuple that starts with it; vLLM's returns (the part to
    be added, the residual), which the next norm adds.
    """
    import torch

    from engines import numerics

    outputs: list[list[torch.Tensor]] = [[] for _ in layers]

    def hook(index: int) -> Any:
        def keep(_: torch.nn.Module, __: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            hidden, residual = (*parts, None)[:2]
            if isinstance(residual, torch.Tensor):
                hidden = numerics.add(hidden, residual)
            # A copy: the engine may write into the same storage again.
            outputs[index].append(hidden.detach().clone().view(-1, hidden.shape[-1]))

        return keep

    handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def record_rollout(
    engine: Any, model: torch.nn.Module, requests: Sequence[SampleRequest], folder: str | Path
) -> list[Sample]:
    """Draw the requests one by one without cached prefixes; write the states of all positions.

    Args:
        engine: A `VllmEngine`.
        model: vLLM's causal LM, with decoder layers at `model.layers`.
        requests: Each is drawn alone, so that every row belongs to it; that a row does not depend
            on the batch is what the preflight probes show.
        folder: Where `rollout.safetensors` is written.

    Raises:
        EngineError: The rows are not the positions of the request, each once.
    """
    import torch

    samples, states = [], {}
    for request in requests:
        engine.reset_prefix_cache()
        with recorded(list(model.get_submodule("model.layers").children())) as outputs:
            (sample,) = engine.generate([request])
        found = torch.stack([torch.cat(rows) for rows in outputs])
        wanted = len(sample.prompt_token_ids) + len(sample.token_ids) - 1
        # Scheduled ahead, an engine runs one row more before it sees that a token was the last.
        ahead = sample.finish_reason == "stop" and found.shape[1] == wanted + 1
        found = found[:, :wanted] if ahead else found
        if found.shape[1] != wanted:
            raise EngineError(
                f"{request.request_id}: {found.shape[1]} positions were computed for "
                f"{wanted} that a sequence of {len(sample.prompt_token_ids)} prompt and "
                f"{len(sample.token_ids)} sampled tokens has; rows cannot be told apart"
            )
        samples.append(sample)
        states[request.request_id] = found
    write_states(Path(folder) / ROLLOUT_FILE, states)
    return samples
