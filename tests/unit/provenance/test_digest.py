"""Laws of the tensor digest, against a slow reference written from its definition."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.provenance import digest as digest_module
from engines.provenance.digest import (
    CHAIN_START,
    PartialDigest,
    accumulate_numpy,
    chain_digest,
    digest_array,
    digest_bytes,
    digest_floats,
    digest_json,
    digest_text,
    digest_tokens,
    partial_of,
    root_digest,
    sha256_file,
)
from engines.provenance.tensor_digest import (
    TensorBlock,
    digest_tensor,
    digest_tensors,
    partial_of_tensor,
    partials_of_tensors,
)

MASK = (1 << 64) - 1
TORCH_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def reference_words(raw: bytes, item_size: int) -> list[int]:
    if item_size == 8:
        return list(struct.unpack(f"<{len(raw) // 4}I", raw))
    code = {1: "B", 2: "H", 4: "I"}[item_size]
    return list(struct.unpack(f"<{len(raw) // item_size}{code}", raw))


def reference_mix_a(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_mix_b(z: int) -> int:
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return z ^ (z >> 33)


def reference_digest(name: str, raw: bytes, item_size: int, dtype: str, shape: tuple) -> str:
    sum_a = sum_b = 0
    for index, word in enumerate(reference_words(raw, item_size)):
        z = (index << 32) | word
        sum_a = (sum_a + reference_mix_a(z)) & MASK
        sum_b = (sum_b + reference_mix_b(z)) & MASK
    parts = [
        b"tensor",
        name.encode(),
        dtype.encode(),
        b"".join(size.to_bytes(8, "little") for size in shape),
        sum_a.to_bytes(8, "little") + sum_b.to_bytes(8, "little"),
    ]
    message = (1).to_bytes(4, "little")
    for part in parts:
        message += len(part).to_bytes(8, "little") + part
    return blake3(message).hexdigest()[:32]


def example(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 50
    return (values > 0) if dtype == torch.bool else values.abs().to(dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5, 3), (3, 4, 2), (0,), (0, 3), (3, 0)], ids=str
)
def test_fast_path_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = example(dtype, *shape)
    raw = raw_bytes(tensor.reshape(-1)) if tensor.numel() else b""
    expected = reference_digest(
        "w", raw, tensor.element_size(), str(dtype).removeprefix("torch."), shape
    )
    assert digest_tensor("w", tensor) == expected


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_numpy_fallback_gives_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest_module.compiled_kernel() is not None
    narrow, wide = example(dtype, 3, 70_001), example(dtype, 1000, 3)
    strided = example(dtype, 200, 64)[:, 5:41]
    fast = [digest_tensor("w", tensor) for tensor in (narrow, wide, strided)]
    monkeypatch.setattr(digest_module, "compiled_kernel", lambda: None)
    assert [digest_tensor("w", tensor) for tensor in (narrow, wide, strided)] == fast


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(TORCH_DTYPES))
def test_any_sharding_and_order_gives_the_same_digest(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    tensor = example(dtype, rows, columns)
    row_cuts = sorted(data.draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=3)) - {rows})
    column_cuts = sorted(
        data.draw(st.sets(st.integers(1, max(1, columns - 1)), max_size=3)) - {columns}
    )
    parts = [
        partial_of_tensor(
            tensor[top:bottom, left:right],
            name="w",
            shape=tensor.shape,
            row_offset=top,
            column_offset=left,
        )
        for top, bottom in zip([0, *row_cuts], [*row_cuts, rows], strict=True)
        for left, right in zip([0, *column_cuts], [*column_cuts, columns], strict=True)
    ]
    merged = PartialDigest(name="w", dtype=parts[0].dtype, shape=(rows, columns))
    for part in data.draw(st.permutations(parts)):
        merged = merged.merge(part)
    assert merged.hexdigest() == digest_tensor("w", tensor)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
    element=st.integers(0, 34),
    data=st.data(),
)
def test_one_flipped_bit_changes_the_digest(
    dtype: torch.dtype, element: int, data: st.DataObject
) -> None:
    tensor = example(dtype, 5, 7)
    raw = bytearray(raw_bytes(tensor))
    size = tensor.element_size()
    bit = data.draw(st.integers(0, 8 * size - 1))
    before = digest_tensor("w", tensor)
    raw[element * size + bit // 8] ^= 1 << (bit % 8)
    flipped = torch.frombuffer(raw, dtype=dtype).reshape(5, 7)
    assert digest_tensor("w", flipped) != before


def test_negation_swaps_names_shapes_and_dtypes_change_the_digest() -> None:
    tensor = example(torch.float32, 4, 6)
    different = {
        "itself": digest_tensor("w", tensor),
        "negated": digest_tensor("w", -tensor),
        "rows swapped": digest_tensor("w", tensor[[1, 0, 2, 3]]),
        "columns swapped": digest_tensor("w", tensor[:, [1, 0, 2, 3, 4, 5]]),
        "renamed": digest_tensor("v", tensor),
        "reshaped": digest_tensor("w", tensor.reshape(6, 4)),
        "flattened": digest_tensor("w", tensor.reshape(-1)),
        "as int32": digest_tensor("w", tensor.view(torch.int32)),
        "as float64": digest_tensor("w", tensor.double()),
        "zeros": digest_tensor("w", torch.zeros(4, 6)),
        "negative zeros": digest_tensor("w", -torch.zeros(4, 6)),
    }
    assert len(set(different.values())) == len(different)


def test_a_linear_form_would_not_see_what_the_mixed_sums_see() -> None:
    # Why the finalizers are there: with z itself summed, two compensating changes cancel.
    a = np.array([10, 20, 30], np.uint32)
    b = np.array([11, 19, 30], np.uint32)

    def linear(words: np.ndarray) -> int:
        return sum((index << 32) | int(word) for index, word in enumerate(words))

    assert linear(a) == linear(b)
    assert digest_array("w", a) != digest_array("w", b)


def test_fused_columns_and_permuted_rows_give_the_logical_digest() -> None:
    whole = example(torch.bfloat16, 6, 8)
    fused = torch.cat([example(torch.bfloat16, 6, 3, seed=1), whole], dim=1)
    part = partial_of_tensor(fused[:, 3:], name="w", shape=(6, 8))
    assert part.hexdigest() == digest_tensor("w", whole)
    order = [4, 2, 0, 5, 1, 3]
    stored = whole[order]
    merged = PartialDigest(name="w", dtype="bfloat16", shape=(6, 8))
    for row, logical in enumerate(order):
        merged = merged.merge(
            partial_of_tensor(stored[row : row + 1], name="w", shape=(6, 8), row_offset=logical)
        )
    assert merged.hexdigest() == digest_tensor("w", whole)


def test_one_dimension_is_cut_by_row_offset() -> None:
    whole = example(torch.float32, 10)
    top = partial_of_tensor(whole[:3], name="b", shape=(10,))
    bottom = partial_of_tensor(whole[3:], name="b", shape=(10,), row_offset=3)
    assert top.merge(bottom).hexdigest() == digest_tensor("b", whole)
    matrix = example(torch.float32, 4, 5)
    run = partial_of_tensor(matrix.reshape(-1)[10:], name="w", shape=(4, 5), row_offset=2)
    head = partial_of_tensor(matrix[:2], name="w", shape=(4, 5))
    assert run.merge(head).hexdigest() == digest_tensor("w", matrix)


def test_strides_offsets_and_transposition_do_not_matter() -> None:
    tensor = example(torch.float32, 6, 5)
    expected = digest_tensor("w", tensor)
    assert digest_tensor("w", tensor.t().contiguous().t()) == expected
    assert digest_tensor("w", torch.cat([tensor, tensor])[6:]) == expected
    spread = torch.zeros(12, 10)
    spread[::2, ::2] = tensor
    assert digest_tensor("w", spread[::2, ::2]) == expected
    assert digest_array("w", tensor.numpy()[::-1][::-1]) == expected
    assert digest_tensors({"w": tensor}) == {"w": expected}


def test_a_gap_and_an_overlap_are_errors() -> None:
    tensor = example(torch.float32, 4, 4)
    top = partial_of_tensor(tensor[:2], name="w", shape=(4, 4))
    with pytest.raises(ValueError, match=r"8 elements.*16; a part is missing"):
        top.hexdigest()
    with pytest.raises(ValueError, match=r"20 elements.*counted twice"):
        top.merge(partial_of_tensor(tensor[1:], name="w", shape=(4, 4), row_offset=1)).hexdigest()


def test_parts_of_two_tensors_cannot_be_merged() -> None:
    part = partial_of(np.zeros((2, 2), np.float32), name="w", dtype="float32", shape=(4, 2))
    for name, shape in (("v", (4, 2)), ("w", (8, 2))):
        other = partial_of(np.zeros((2, 2), np.float32), name=name, dtype="float32", shape=shape)
        with pytest.raises(ValueError, match="cannot be merged"):
            part.merge(other)


def test_blocks_that_do_not_fit_are_refused() -> None:
    block = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="outside of the tensor"):
        partial_of(block, name="w", dtype="float32", shape=(4, 3), row_offset=3)
    with pytest.raises(ValueError, match="outside of the tensor"):
        partial_of(block, name="w", dtype="float32", shape=(4, 3), column_offset=1)
    with pytest.raises(ValueError, match="outside of the tensor"):
        partial_of(block, name="w", dtype="float32", shape=(4, 3), row_offset=-1)
    with pytest.raises(ValueError, match="4 bytes, bfloat16 has 2"):
        partial_of(block, name="w", dtype="bfloat16", shape=(4, 3))
    with pytest.raises(ValueError, match="'complex64' is not one of"):
        partial_of(block, name="w", dtype="complex64", shape=(4, 3))
    with pytest.raises(ValueError, match="whole rows"):
        partial_of(np.zeros(4, np.float32), name="w", dtype="float32", shape=(4, 3))
    with pytest.raises(ValueError, match=r"2\^32 words"):
        partial_of(block, name="w", dtype="float32", shape=(1 << 31, 3))
    with pytest.raises(ValueError, match="complex64"):
        digest_tensor("w", torch.zeros(2, dtype=torch.complex64))


def test_kernel_counts_the_logical_index_beyond_32_bits_of_bytes() -> None:
    # The last rows of a tensor of 2^32 words: the index must neither wrap nor be truncated.
    shape = (1 << 30, 4)
    row = np.array([[7, 8, 9, 10]], np.uint32)
    last = (1 << 30) - 1
    part = partial_of(row, name="w", dtype="uint32", shape=shape, row_offset=last)
    expected = sum(
        reference_mix_a((((last * 4) + column) << 32) | int(row[0, column])) for column in range(4)
    )
    assert part.sum_a == expected & MASK
    slow = accumulate_numpy(row.reshape(-1), 1, 4, 4, last * 4, 4)
    assert slow == (part.sum_a, part.sum_b)


def test_floats_are_float32_and_exact() -> None:
    values = [0.1, -0.0, float("inf"), float("nan")]
    exact = [float(np.float32(value)) for value in values]
    assert digest_floats("r", exact) == digest_array("r", np.asarray(exact, np.float32))
    assert digest_floats("r", [0.0]) != digest_floats("r", [-0.0])
    with pytest.raises(ValueError, match=r"0\.1 at position 0 is not a float32"):
        digest_floats("r", [0.1])
    with pytest.raises(ValueError, match="not a float32"):
        digest_floats("r", [1e300])


def test_tokens_texts_bytes_and_json_are_told_apart() -> None:
    assert digest_tokens("s", [1, 2]) == digest_array("s", np.array([1, 2], np.int64))
    assert digest_tokens("s", [1, 2]) != digest_tokens("s", [2, 1])
    assert digest_tokens("s", []) != digest_floats("s", [])
    assert digest_text("ab", "c") != digest_text("a", "bc")
    assert digest_bytes(b"x") != digest_text("", "x")
    assert digest_json({"a": 1, "b": (2, 3)}) == digest_json({"b": [2, 3], "a": 1})
    assert len({digest_json(value) for value in (1, 1.0, True, "1", None, [1], -0.0, 0.0)}) == 8
    with pytest.raises(TypeError, match="key 1 is int"):
        digest_json({"a": [{1: 2}]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest_json([float("nan")])


def test_root_covers_names_and_digests_but_not_their_order() -> None:
    digests = {"a": "1" * 32, "b": "2" * 32}
    root = root_digest(digests)
    assert root_digest(dict(reversed(digests.items()))) == root
    assert root_digest({"a": "2" * 32, "b": "1" * 32}) != root
    assert root_digest({"a": "1" * 32}) != root
    assert root_digest({"a1": "1" * 31, "b": "2" * 32}) != root
    assert root_digest({}) != root_digest({"": ""})


def test_chain_depends_on_everything_before_it() -> None:
    first = chain_digest(CHAIN_START, "tokens", "r1")
    assert len({first, chain_digest(CHAIN_START, "tokens", "r2"), CHAIN_START}) == 3
    assert chain_digest(first, "loss", "r3") != chain_digest(CHAIN_START, "loss", "r3")
    assert chain_digest(first, "loss", "r3") != chain_digest(first, "grads", "r3")


def test_file_digest_is_plain_sha256(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert sha256_file(path) == ("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")


def test_many_tensors_together_have_the_digests_of_each_alone() -> None:
    tensors = {
        str(index): torch.arange(index * 40, dtype=torch.float32).view(index, 40).to(dtype)
        for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.uint8))
    }
    alone = {name: digest_tensor(name, tensor) for name, tensor in tensors.items()}
    assert digest_tensors(tensors) == alone
    parts = partials_of_tensors(
        [
            TensorBlock(tensors["3"][:1], "3", (3, 40)),
            TensorBlock(tensors["3"][1:], "3", (3, 40), row_offset=1),
        ]
    )
    assert parts[0].merge(parts[1]).hexdigest() == alone["3"]
    changed = {**tensors, "3": tensors["3"].clone()}
    changed["3"][2, 1] ^= 1
    assert {n for n, d in digest_tensors(changed).items() if d != alone[n]} == {"3"}
