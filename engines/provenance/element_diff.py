"""Where two values of one name differ: the first element, both values, and how far apart they are.

Distance is in units in the last place (ULP): the bits of a float are mapped to integers in the
order of the values, all bit patterns to different ones, so that the distance is 0 exactly when the
bits are equal. -0.0 and 0.0 are therefore 1 apart. A NaN lies outside of the order: a pair with
one has no distance.

    difference = diff_elements(load_tensor(path_a, name), load_tensor(path_b, name))
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model_specs.errors import ArtifactError

# Names of safetensors, https://github.com/huggingface/safetensors#format
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ITEM_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_FLOATS = ("float64", "float32", "float16", "bfloat16")

Histogram = tuple[tuple[int, int, int], ...]
"""(smallest, largest, number of elements) by powers of two: 1, 2, 3-4, 5-8, ... ULP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """The bits of a value."""

    bits: npt.NDArray[np.unsignedinteger[Any]]
    """Unsigned integers of the element's size, in the shape of the value."""
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDifference:
    """The first element that differs, and all of them in numbers."""

    element: tuple[int, ...]
    value_a: float | int
    value_b: float | int
    hex_a: str
    """Storage bits."""
    hex_b: str
    ulp: int | None
    """None for integers and where a NaN is involved."""
    num_differing: int
    num_elements: int
    max_ulp: int | None
    """Largest distance among the differing elements without a NaN."""
    ulp_histogram: Histogram = ()
    """Of the differing elements without a NaN; empty for integers."""


def elements_of(values: Sequence[float | int]) -> Elements:
    """Return sample values as elements: int64, float32 where all are, else float64."""
    if not any(isinstance(value, float) for value in values):
        return Elements(bits=np.asarray(values, np.int64).view(np.uint64), dtype="int64")
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(np.float32)
    if np.array_equal(rounded.astype(np.float64), exact, equal_nan=True):
        return Elements(bits=rounded.view(np.uint32), dtype="float32")
    return Elements(bits=exact.view(np.uint64), dtype="float64")


def diff_elements(a: Elements, b: Elements) -> ElementDifference | None:
    """Compare two values of one shape and dtype; None when all bits are equal.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if a.bits.shape != b.bits.shape or a.dtype != b.dtype:
        raise ValueError(
            f"{a.dtype} of shape {a.bits.shape} and {b.dtype} of shape {b.bits.shape} have no "
            "elements in common"
        )
    flat_a, flat_b = a.bits.reshape(-1), b.bits.reshape(-1)
    where = np.flatnonzero(flat_a != flat_b)
    if not where.size:
        return None
    first = int(where[0])
    ulp, distances = _distances(flat_a[where], flat_b[where], a.dtype)
    digits = 2 * a.bits.dtype.itemsize
    return ElementDifference(
        element=tuple(int(i) for i in np.unravel_index(first, a.bits.shape)),
        value_a=decode_bits(flat_a[first : first + 1], a.dtype)[0].item(),
        value_b=decode_bits(flat_b[first : first + 1], b.dtype)[0].item(),
        hex_a=f"0x{int(flat_a[first]):0{digits}x}",
        hex_b=f"0x{int(flat_b[first]):0{digits}x}",
        ulp=ulp,
        num_differing=where.size,
        num_elements=flat_a.size,
        max_ulp=int(distances.max()) if distances.size else None,
        ulp_histogram=histogram(distances),
    )


def histogram(distances: npt.NDArray[np.unsignedinteger[Any]]) -> Histogram:
    """Count distances of at least 1 by powers of two; empty buckets are left out."""
    bounds = np.left_shift(np.uint64(1), np.arange(64, dtype=np.uint64))
    counts = np.bincount(np.searchsorted(bounds, distances.astype(np.uint64)), minlength=1)
    return tuple(
        (2 ** (power - 1) + 1 if power else 1, 2**power, int(counts[power]))
        for power in np.flatnonzero(counts).tolist()
    )


def ulp_distance(a: float, b: float, dtype: str = "float32") -> int | None:
    """Return the distance of two values of a dtype of numpy; None where one is a NaN."""
    size = np.dtype(dtype).itemsize
    bits = [np.asarray([value], dtype).view(f"u{size}") for value in (a, b)]
    return _distances(bits[0], bits[1], dtype)[0]


def decode_bits(
    bits: npt.NDArray[np.unsignedinteger[Any]], dtype: str
) -> npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]:
    """Return the values that bits of this dtype stand for; bfloat16 as float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "bool":
        return bits
    decoded: npt.NDArray[Any] = bits.view(np.dtype(dtype))
    return decoded


def _distances(
    a: npt.NDArray[np.unsignedinteger[Any]],
    b: npt.NDArray[np.unsignedinteger[Any]],
    dtype: str,
) -> tuple[int | None, npt.NDArray[np.unsignedinteger[Any]]]:
    """Return the distance of the first pair, and those of all pairs without a NaN."""
    if dtype not in _FLOATS:
        return None, np.zeros(0, np.uint64)
    with np.errstate(invalid="ignore"):
        has_nan = np.isnan(decode_bits(a, dtype)) | np.isnan(decode_bits(b, dtype))
    ordered_a, ordered_b = _ordered(a), _ordered(b)
    distance = np.maximum(ordered_a, ordered_b) - np.minimum(ordered_a, ordered_b)
    return (None if has_nan[0] else int(distance[0])), distance[~has_nan]


def _ordered(bits: npt.NDArray[np.unsignedinteger[Any]]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Map float bits to unsigned integers that grow with the value."""
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def load_tensor(path: Path, name: str) -> Elements:
    """Read one tensor's bits from a safetensors file, without torch and without reading the rest.

    Raises:
        ArtifactError: the file is damaged or has no such tensor.
    """
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        row = header[name]
        shape = tuple(int(size) for size in row["shape"])
        size = _ITEM_SIZES.get(row["dtype"], 1)
        start, stop = row["data_offsets"]
        if stop - start != size * math.prod(shape):
            raise ValueError(f"{stop - start} bytes for {row['dtype']} of shape {shape}")
        dtype = _SAFETENSORS_DTYPES[row["dtype"]]
        bits = np.fromfile(path, f"<u{size}", count=math.prod(shape), offset=8 + length + start)
        return Elements(bits=bits.reshape(shape), dtype=dtype)
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise ArtifactError(f"{path}: tensor {name} cannot be read: {error!r}") from error
