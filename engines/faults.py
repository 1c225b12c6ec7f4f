"""Faults on purpose: flip one bit of one live value, to show that the evidence sees it.

Invariant: the bit that is flipped belongs to the storage that the run goes on with, never to a
copy or to what the recorder sees; flipping twice restores the bits. No torch is imported here
unless a torch tensor is given.

    flip = parse_flip("step=3,probe=grads,tensor=lm_head.weight,element=17,bit=3")
    if choose_name(gradients, flip) == name:
        before, after = flip_bit(gradients[name], flip.element, flip.bit)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engines.contracts import PROBES, Flip
from model_specs.errors import SpecError

if TYPE_CHECKING:
    import torch

FLIP_PROBES = (
    "tokens",
    "rollout_logprobs",
    "rewards",
    "advantages",
    "train_logprobs",
    "loss",
    "grads",
    "grad_norm",
    "optimizer",
    "weights",
    "sent",
    "received",
)
"""Probes whose live value can be flipped: all but `prompts`, which are an input."""

_FLIP_KEYS = ("step", "probe", "tensor", "name", "element", "bit")


def parse_flip(text: str) -> Flip:
    """Read `step=3,probe=grads[,tensor=NAME][,element=N][,bit=N]`; `name` means `tensor`.

    Raises:
        SpecError: a key, a probe or a number that cannot be used.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not value or key not in _FLIP_KEYS:
            raise SpecError(
                f"--inject-flip: {part.strip()!r} is not one of "
                f"{', '.join(f'{known}=...' for known in _FLIP_KEYS)} (in {text!r})"
            )
        key = "tensor" if key == "name" else key
        if key in values:
            raise SpecError(f"--inject-flip: {key} is given twice: {values[key]!r} and {value!r}")
        values[key] = value
    for key in ("step", "probe"):
        if key not in values:
            raise SpecError(f"--inject-flip: {key}=... is missing in {text!r}")
    probe = next((known for known in FLIP_PROBES if known == values["probe"]), None)
    if probe is None:
        kind = "cannot be flipped" if values["probe"] in PROBES else "is unknown"
        raise SpecError(
            f"--inject-flip: probe {values['probe']!r} {kind}; one of {', '.join(FLIP_PROBES)}"
        )
    return Flip(
        step=_number(values, "step", smallest=1),
        probe=probe,  # type: ignore[arg-type]
        name=values.get("tensor"),
        element=_number(values, "element", smallest=0),
        bit=_number(values, "bit", smallest=0),
    )


def _number(values: dict[str, str], key: str, *, smallest: int) -> int:
    text = values.get(key, "0")
    try:
        number = int(text)
    except ValueError:
        raise SpecError(f"--inject-flip: {key}={text!r} is not a whole number") from None
    if number < smallest:
        raise SpecError(f"--inject-flip: {key}={number} is below {smallest}")
    return number


def choose_name(names: Iterable[str], flip: Flip) -> str:
    """Return the tensor or sample that the flip means: its own name, or the first in sorted order.

    Raises:
        SpecError: there is none of that name.
    """
    known = sorted(names)
    if flip.name is None:
        if not known:
            raise SpecError(f"flip: probe {flip.probe} has no value at step {flip.step}")
        return known[0]
    if flip.name not in known:
        shown = ", ".join(known[:8]) + (f", ... ({len(known)} in all)" if len(known) > 8 else "")
        raise SpecError(f"flip: probe {flip.probe} has no {flip.name!r}; it has {shown}")
    return flip.name


def flip_bit(
    values: npt.NDArray[Any] | torch.Tensor, element: int, bit: int
) -> tuple[float | int | bool, float | int | bool]:
    """Flip one bit of one element in place.

    Args:
        values: A numpy array or torch tensor of any shape and stride; its own storage is changed.
        element: Index of the element in row-major (C) order of `shape`.
        bit: 0 is the lowest bit of the element's storage.

    Returns:
        The value before and after.

    Raises:
        SpecError: the element or the bit does not exist.
    """
    shape = tuple(values.shape)
    size = int(np.prod(shape, dtype=np.int64))
    item_size = values.itemsize
    if not 0 <= element < size:
        raise SpecError(f"flip: element {element} is outside of a value of shape {shape} ({size})")
    if not 0 <= bit < 8 * item_size:
        raise SpecError(f"flip: bit {bit} is outside of {values.dtype} ({8 * item_size} bits)")
    index = tuple(int(i) for i in np.unravel_index(element, shape)) if shape else ()
    if isinstance(values, np.ndarray):
        before = values[index].item()
        _flip_in_array(values, index, bit)
        return before, values[index].item()
    return _flip_in_tensor(values, index, bit)


def _flip_in_array(values: npt.NDArray[Any], index: tuple[int, ...], bit: int) -> None:
    storage = values.view(f"u{values.dtype.itemsize}")
    storage[index] ^= storage.dtype.type(1 << bit)


def _flip_in_tensor(
    tensor: torch.Tensor, index: tuple[int, ...], bit: int
) -> tuple[float | int | bool, float | int | bool]:
    import torch

    containers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    live = tensor.detach()
    before = live[index].item()
    storage = live.view(containers[live.element_size()])
    if storage.device.type == "cpu":
        # numpy shares the storage and is not stopped by inference mode.
        _flip_in_array(storage.numpy(), index, bit)
    else:
        mask = 1 << bit
        if mask == 1 << (8 * live.element_size() - 1) and storage.dtype != torch.uint8:
            mask = -mask  # the sign bit of a signed container
        storage[index].bitwise_xor_(mask)
    return before, live[index].item()


def flip_float32(value: float, bit: int) -> float:
    """Return a float32 value, carried as a Python float, with one bit of its 32 flipped.

    Raises:
        SpecError: there is no such bit.
    """
    if not 0 <= bit < 32:
        raise SpecError(f"flip: bit {bit} is outside of float32 (32 bits)")
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", bits ^ (1 << bit)))[0])


def flip_int(value: int, bit: int) -> int:
    """Return a non-negative integer (a token id) with one of its low 63 bits flipped.

    Raises:
        SpecError: there is no such bit.
    """
    if not 0 <= bit < 63:
        raise SpecError(f"flip: bit {bit} is outside of a non-negative int64 (63 bits)")
    return value ^ (1 << bit)
