"""Laws of faults on purpose: one bit, of the live storage, and errors that say what there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.contracts import PROBES, Flip
from engines.faults import (
    FLIP_PROBES,
    choose_name,
    flip_bit,
    flip_float32,
    flip_int,
    parse_flip,
)
from model_specs.errors import SpecError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_of_a_tensor_flips_alone_and_flipping_twice_restores_it(
    dtype: torch.dtype,
) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    before = tensor.view(torch.uint8).numpy().copy()
    for bit in range(8 * tensor.element_size()):
        flip_bit(tensor, 7, bit)
        changed = np.bitwise_xor(tensor.view(torch.uint8).numpy(), before).reshape(-1)
        assert int(np.unpackbits(changed).sum()) == 1
        assert int(changed[7 * tensor.element_size() + bit // 8]) == 1 << (bit % 8)
        flip_bit(tensor, 7, bit)
        assert np.array_equal(tensor.view(torch.uint8).numpy(), before)


def test_the_live_storage_of_parameters_views_and_inference_tensors_changes() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    assert flip_bit(parameter, 4, 31) == (1.0, -1.0)
    assert parameter[1, 1].item() == -1.0
    fused = torch.ones(4, 6)
    flip_bit(fused[:, 2:4], 5, 31)  # element 5 of a view of 2 columns is row 2, column 1
    assert fused[2, 3].item() == -1.0
    transposed = torch.ones(2, 3)
    flip_bit(transposed.t(), 1, 31)
    assert transposed[1, 0].item() == -1.0
    with torch.inference_mode():
        inference = torch.ones(2)
    assert flip_bit(inference, 0, 31) == (1.0, -1.0)
    assert flip_bit(torch.tensor(1.0), 0, 31) == (1.0, -1.0)


def test_numpy_arrays_flip_in_place_whatever_their_stride() -> None:
    array = np.ones((4, 6), np.float32)
    assert flip_bit(array[:, ::2], 4, 0) == (1.0, 1.0000001192092896)
    assert np.argwhere(array != 1).tolist() == [[1, 2]]
    scalar = np.ones((), np.float64)
    assert flip_bit(scalar, 0, 63) == (1.0, -1.0)
    assert scalar == -1.0


def test_elements_and_bits_that_do_not_exist_are_refused() -> None:
    for element, bit, text in (
        (6, 0, r"element 6 .* shape \(2, 3\)"),
        (-1, 0, "element -1"),
        (0, 32, r"bit 32 .*float32 \(32 bits\)"),
        (0, -1, "bit -1"),
    ):
        with pytest.raises(SpecError, match=text):
            flip_bit(torch.ones(2, 3), element, bit)
        with pytest.raises(SpecError, match=text):
            flip_bit(np.ones((2, 3), np.float32), element, bit)
    with pytest.raises(SpecError, match="bit 32 is outside of float32"):
        flip_float32(1.0, 32)
    with pytest.raises(SpecError, match="bit 63"):
        flip_int(3, 63)


@given(value=st.floats(width=32, allow_nan=False), bit=st.integers(0, 31))
def test_a_sample_value_flips_like_storage(value: float, bit: int) -> None:
    array = np.array([value], np.float32)
    _, after = flip_bit(array, 0, bit)
    flipped = flip_float32(value, bit)
    assert flipped == after or (math.isnan(flipped) and math.isnan(after))
    assert flip_int(flip_int(5, bit), bit) == 5
    assert flip_int(5, bit) != 5


def test_a_full_and_a_short_flip_are_read() -> None:
    assert parse_flip("step=3,probe=grads,tensor=lm_head.weight,element=17,bit=3") == Flip(
        step=3, probe="grads", name="lm_head.weight", element=17, bit=3
    )
    assert parse_flip("step=1, probe=tokens, name=1/train-0/2") == Flip(
        step=1, probe="tokens", name="1/train-0/2"
    )
    for probe in FLIP_PROBES:
        assert parse_flip(f"step=1,probe={probe}").probe == probe
    assert set(PROBES) - set(FLIP_PROBES) == {"prompts"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step=3", "probe=... is missing"),
        ("probe=grads", "step=... is missing"),
        ("step=3,probe=gradients", "'gradients' is unknown; one of tokens, .*grads.*received"),
        ("step=3,probe=prompts", "'prompts' cannot be flipped; one of tokens"),
        ("step=x,probe=grads", "step='x' is not a whole number"),
        ("step=0,probe=grads", "step=0 is below 1"),
        ("step=1,probe=grads,bit=-1", "bit=-1 is below 0"),
        ("step=1,probe=grads,size=2", "'size=2' is not one of step="),
        ("step=1,probe=grads,bit=", "'bit=' is not one of"),
        ("step=1,step=2,probe=grads", "step is given twice: '1' and '2'"),
        ("", "'' is not one of step="),
    ],
)
def test_a_flip_that_cannot_be_read_is_refused_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_flip(text)


def test_the_name_is_the_flips_own_or_the_first_in_sorted_order() -> None:
    flip = Flip(step=1, probe="grads")
    assert choose_name(["b", "a"], flip) == "a"
    assert choose_name(["b", "a"], Flip(step=1, probe="grads", name="b")) == "b"
    with pytest.raises(SpecError, match="has no 'c'; it has a, b"):
        choose_name(["b", "a"], Flip(step=1, probe="grads", name="c"))
    with pytest.raises(SpecError, match="has no value at step 1"):
        choose_name([], flip)
