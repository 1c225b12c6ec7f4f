"""Digests of tensors, samples, texts and files; free of torch.

A tensor digest is logical and additive. Each element becomes 32-bit words; every word is joined
with its position in the whole tensor, `z = (logical word index << 32) | word`, and two bijective
64-bit finalizers of z are summed modulo 2^64. Sums do not care about order, so the parts of a
tensor may be digested where they lie (rank by rank, out of a fused matrix, chunk by chunk) and
merged:

    whole = partial_of(top, name="w", dtype="float32", shape=(8, 4)).merge(
        partial_of(bottom, name="w", dtype="float32", shape=(8, 4), row_offset=4)
    )
    whole.hexdigest() == digest_array("w", full)

Invariant: equal name, dtype, shape and bits give one digest, however the tensor was cut; the
number of elements seen must equal the number of elements of the shape, so that a gap, a replica
counted twice or padding counted as data is an error. The digest finds accidents, not adversaries;
files use SHA-256.

Words of an element: 1 and 2 bytes, zero-extended, one word; 4 bytes, one word; 8 bytes, two words,
the low half first. A tensor of n dimensions is the matrix [shape[0], prod(shape[1:])]; one of one
dimension is the matrix [n, 1] and a scalar [1, 1], so that `row_offset` always counts along
dimension 0.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from engines.provenance.evidence_time import evidence

DIGEST_VERSION = 1
"""Raised when the definition of any digest changes; part of every digest."""

DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest (128 bits)."""

ITEM_SIZES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
"""Bytes of an element of each dtype that can be digested."""

_MAX_WORDS = 1 << 32
_MASK = (1 << 64) - 1
_NUMPY_CHUNK = 1 << 16

# Finalizer A: Stafford's variant 13, the output function of SplitMix64 (Steele, Lea, Flood 2014).
_A1 = np.uint64(0xBF58476D1CE4E5B9)
_A2 = np.uint64(0x94D049BB133111EB)
# Finalizer B: fmix64 of MurmurHash3 (Appleby).
_B1 = np.uint64(0xFF51AFD7ED558CCD)
_B2 = np.uint64(0xC4CEB9FE1A85EC53)
_S27 = np.uint64(27)
_S30 = np.uint64(30)
_S31 = np.uint64(31)
_S32 = np.uint64(32)
_S33 = np.uint64(33)

Words = npt.NDArray[np.unsignedinteger[Any]]
Kernel = Callable[[Words, int, int, int, int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialDigest:
    """The accumulator of a part of one tensor."""

    name: str
    dtype: str
    """Without a prefix: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    """Of the whole tensor, never of the part."""
    sum_a: int = 0
    """Sum of finalizer A over the words seen, modulo 2^64."""
    sum_b: int = 0
    count: int = 0
    """Elements seen."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    def merge(self, other: PartialDigest) -> PartialDigest:
        """Return the accumulator of both parts.

        Raises:
            ValueError: the two are not parts of one tensor.
        """
        mine = (self.name, self.dtype, self.shape)
        theirs = (other.name, other.dtype, other.shape)
        if mine != theirs:
            raise ValueError(f"parts of two tensors cannot be merged: {mine} and {theirs}")
        return replace(
            self,
            sum_a=(self.sum_a + other.sum_a) & _MASK,
            sum_b=(self.sum_b + other.sum_b) & _MASK,
            count=self.count + other.count,
        )

    def hexdigest(self) -> str:
        """Return the 32 hexadecimal digits of BLAKE3(version, name, dtype, shape, sums).

        Raises:
            ValueError: fewer or more elements were seen than the tensor has.
        """
        if self.count != self.numel:
            kind = "a part is missing" if self.count < self.numel else "a part was counted twice"
            raise ValueError(
                f"{self.name}: {self.count} elements were digested of a tensor of shape "
                f"{self.shape} with {self.numel}; {kind}"
            )
        return _hash(
            "tensor",
            self.name.encode(),
            self.dtype.encode(),
            struct.pack(f"<{len(self.shape)}Q", *self.shape),
            struct.pack("<QQ", self.sum_a, self.sum_b),
        )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor of this shape, as the module docstring defines them."""
    if not shape:
        return 1, 1
    return shape[0], math.prod(shape[1:])


def partial_of(
    array: npt.NDArray[Any],
    *,
    name: str,
    dtype: str,
    shape: Sequence[int],
    row_offset: int = 0,
    column_offset: int = 0,
) -> PartialDigest:
    """Digest one block of a tensor.

    Args:
        array: The elements of the block; its item size must be that of `dtype`, its own dtype does
            not matter (bfloat16 comes as uint16). With two dimensions or more it is the block
            [array.shape[0], prod(array.shape[1:])]; with one, it is a run of whole rows. A matrix
            may have any row stride, as a slice of columns of a larger one has; other
            strided arrays are copied.
        name: Logical name, part of the digest.
        dtype: Logical dtype, a key of `ITEM_SIZES`.
        shape: Shape of the whole tensor.
        row_offset: First row of the block in the matrix of the whole tensor.
        column_offset: First column of it.

    Raises:
        ValueError: unknown dtype, other item size, or a block outside of the tensor.
    """
    shape = tuple(int(size) for size in shape)
    item_size = ITEM_SIZES.get(dtype)
    if item_size is None:
        raise ValueError(f"{name}: dtype {dtype!r} is not one of {', '.join(ITEM_SIZES)}")
    if array.dtype.itemsize != item_size:
        raise ValueError(
            f"{name}: elements of {array.dtype} have {array.dtype.itemsize} bytes, {dtype} has "
            f"{item_size}"
        )
    rows, columns = matrix_shape(shape)
    words_per_element = 2 if item_size == 8 else 1
    if rows * columns * words_per_element > _MAX_WORDS:
        raise ValueError(
            f"{name}: shape {shape} has more than 2^32 words, which the word index cannot count"
        )
    block = _as_matrix(array, columns)
    end_row, end_column = row_offset + block.shape[0], column_offset + block.shape[1]
    inside = row_offset >= 0 and column_offset >= 0 and end_row <= rows and end_column <= columns
    if block.size and not inside:
        raise ValueError(
            f"{name}: block [{row_offset}:{end_row}, {column_offset}:{end_column}] is outside of "
            f"the tensor's [{rows}, {columns}] (shape {shape})"
        )
    empty = PartialDigest(name=name, dtype=dtype, shape=shape)
    if not block.size:
        return empty
    sum_a, sum_b = _accumulate_block(
        block,
        first_index=(row_offset * columns + column_offset) * words_per_element,
        index_step=columns * words_per_element,
    )
    return replace(empty, sum_a=sum_a, sum_b=sum_b, count=block.size)


@evidence
def digest_array(name: str, array: npt.NDArray[Any], dtype: str | None = None) -> str:
    """Digest a whole array; `dtype` is the logical dtype where numpy's is only a container."""
    return partial_of(
        array.reshape(matrix_shape(array.shape)),
        name=name,
        dtype=dtype or array.dtype.name,
        shape=array.shape,
    ).hexdigest()


@evidence
def digest_floats(name: str, values: Iterable[float]) -> str:
    """Digest float32 values that are carried as Python floats, as a tensor of one dimension.

    Raises:
        ValueError: a value is not a float32.
    """
    exact = np.asarray(list(values), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(np.float32)
    inexact = np.flatnonzero((rounded.astype(np.float64) != exact) & ~np.isnan(exact))
    if inexact.size:
        position = int(inexact[0])
        raise ValueError(
            f"{name}: value {exact[position].item()!r} at position {position} is not a float32 "
            f"(nearest {rounded[position].item()!r})"
        )
    return digest_array(name, rounded)


@evidence
def digest_tokens(name: str, token_ids: Iterable[int]) -> str:
    """Digest token ids as an int64 tensor of one dimension."""
    return digest_array(name, np.asarray(list(token_ids), dtype=np.int64))


def digest_text(name: str, text: str) -> str:
    """Digest a named text (UTF-8)."""
    return _hash("text", name.encode(), text.encode())


def digest_bytes(content: bytes) -> str:
    """Digest bytes."""
    return _hash("bytes", content)


@evidence
def digest_json(value: Any) -> str:
    """Digest a JSON value in canonical form: sorted keys, no spaces, shortest exact floats.

    A tuple equals a list; 1 and 1.0 differ, and so do 0.0 and -0.0.

    Raises:
        ValueError: a NaN or an infinity.
        TypeError: a key that is not a string, or a value that JSON does not have.
    """
    _check_keys(value)
    return _hash("json", _canonical_json(value))


@evidence
def root_digest(digests: Mapping[str, str]) -> str:
    """Digest a set of named digests, whatever the order they come in."""
    parts = [part.encode() for name in sorted(digests) for part in (name, digests[name])]
    return _hash("root", *parts)


CHAIN_START = hashlib.sha256(b"lockstep chain 1").hexdigest()[:DIGEST_LENGTH]
"""d_0: a constant of the ledger's schema; the identity is compared beside the chain, not in it."""


def chain_digest(previous: str, probe: str, root: str) -> str:
    """Return d_k = H(d_(k-1), probe, root)."""
    return _hash("chain", previous.encode(), probe.encode(), root.encode())


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(kind: str, *parts: bytes) -> str:
    """BLAKE3 over a versioned tag and length-prefixed parts, so that no two part lists coincide."""
    hasher = blake3(struct.pack("<I", DIGEST_VERSION))
    for part in (kind.encode(), *parts):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return str(hasher.hexdigest()[:DIGEST_LENGTH])


def _canonical_json(value: Any) -> bytes:
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode()


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is {type(key).__name__}; JSON keys must be strings")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def _as_matrix(array: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """Return the block as a matrix whose rows are contiguous, without a copy where possible."""
    if array.ndim == 0:
        return array.reshape(1, 1)
    if array.ndim == 1:
        if columns and array.size % columns:
            raise ValueError(
                f"a run of {array.size} elements is not made of whole rows of {columns}; "
                "give a matrix and its column_offset"
            )
        block = array.reshape(-1, columns) if columns else array.reshape(0, 0)
    else:
        block = array.reshape(array.shape[0], math.prod(array.shape[1:]))
    if block.shape[1] > 1 and block.strides[1] != block.itemsize:
        return np.ascontiguousarray(block)
    if block.strides[0] < 0 or block.strides[0] % block.itemsize:
        return np.ascontiguousarray(block)
    return block


def _accumulate_block(
    block: npt.NDArray[Any], *, first_index: int, index_step: int
) -> tuple[int, int]:
    """Return both sums over a matrix with contiguous rows; indices are in words."""
    rows, columns = block.shape
    stride = block.strides[0] // block.itemsize if rows > 1 else columns
    # The kernels want one flat unit-stride array: that is what compilers vectorise.
    flat = np.lib.stride_tricks.as_strided(
        block, shape=((rows - 1) * stride + columns,), strides=(block.itemsize,), writeable=False
    )
    if block.itemsize == 8:
        words, columns, stride = flat.view("<u4"), columns * 2, stride * 2
    else:
        words = flat.view(f"<u{block.itemsize}")
    if stride == columns == index_step:
        rows, columns = 1, rows * columns
    kernel = compiled_kernel() or accumulate_numpy
    sum_a, sum_b = kernel(words, rows, columns, stride, first_index, index_step)
    return int(sum_a) & _MASK, int(sum_b) & _MASK


def accumulate_numpy(
    words: Words, rows: int, columns: int, stride: int, first_index: int, index_step: int
) -> tuple[int, int]:
    """Sum both finalizers with numpy alone; the same bits as the compiled kernel.

    Args:
        words: Unit-stride words of 1, 2 or 4 bytes.
        rows: Rows of the block.
        columns: Words of one row.
        stride: Words from one row to the next in `words`.
        first_index: Logical index of the first word.
        index_step: Logical words from one row to the next.
    """
    sum_a = sum_b = 0
    # A narrow block is cheaper as one gather than row by row.
    rows_per_chunk = max(1, _NUMPY_CHUNK // columns)
    for row in range(0, rows, rows_per_chunk):
        row_ids = np.arange(row, min(rows, row + rows_per_chunk), dtype=np.int64)[:, None]
        for column in range(0, columns, _NUMPY_CHUNK):
            column_ids = np.arange(column, min(columns, column + _NUMPY_CHUNK), dtype=np.int64)
            index = (first_index + row_ids * index_step + column_ids).astype(np.uint64)
            word = words[row_ids * stride + column_ids].astype(np.uint64)
            z = (index << _S32) | word
            sum_a += int(mix_a(z).sum(dtype=np.uint64))
            sum_b += int(mix_b(z).sum(dtype=np.uint64))
    return sum_a & _MASK, sum_b & _MASK


def mix_a(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply finalizer A to each 64-bit value."""
    z = (z ^ (z >> _S30)) * _A1
    z = (z ^ (z >> _S27)) * _A2
    return z ^ (z >> _S31)


def mix_b(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply finalizer B to each 64-bit value."""
    z = (z ^ (z >> _S33)) * _B1
    z = (z ^ (z >> _S33)) * _B2
    return z ^ (z >> _S33)


def _accumulate(
    words: Words, rows: int, columns: int, stride: int, first_index: int, index_step: int
) -> tuple[np.uint64, np.uint64]:
    """Compiled by numba; arguments as in `accumulate_numpy`."""
    sum_a = np.uint64(0)
    sum_b = np.uint64(0)
    for row in range(rows):
        # A slice indexed from zero has no negative-index branch in the way of vectorisation.
        line = words[row * stride : row * stride + columns]
        first = np.uint64(first_index + row * index_step)
        for column in range(columns):
            z = ((first + np.uint64(column)) << _S32) | np.uint64(line[column])
            a = (z ^ (z >> _S30)) * _A1
            a = (a ^ (a >> _S27)) * _A2
            sum_a += a ^ (a >> _S31)
            b = (z ^ (z >> _S33)) * _B1
            b = (b ^ (b >> _S33)) * _B2
            sum_b += b ^ (b >> _S33)
    return sum_a, sum_b


@functools.cache
def compiled_kernel() -> Kernel | None:
    """Return the numba kernel, or None where numba is not installed."""
    try:
        import numba
    except ImportError:
        return None
    kernel: Kernel = numba.njit(cache=True, nogil=True)(_accumulate)
    return kernel
