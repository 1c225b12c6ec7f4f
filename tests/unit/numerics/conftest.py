"""What the tests of numerics share: both dtypes, one thread unless said, equality of bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

ROW_COUNTS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 130, 200)


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def same_bits() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Equal shape, dtype and storage bits: -0 is not +0, a NaN equals itself."""

    def compare(a: torch.Tensor, b: torch.Tensor) -> bool:
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
        )

    return compare


@pytest.fixture
def every_placing_agrees(
    same_bits: Callable[[torch.Tensor, torch.Tensor], bool],
) -> Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], None]:
    """Assert that an op gives rows the same bits however many they are and wherever they lie."""

    def check(op: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
        everything = op(rows)
        wide = torch.cat((rows, torch.randn_like(rows)), dim=-1)
        strided = wide[..., : rows.shape[-1]]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert same_bits(op(rows), everything), f"{threads} threads"
            assert same_bits(op(strided), everything), "strided"
            for count in ROW_COUNTS:
                first = count * 13 % (len(rows) - count + 1)
                here = slice(first, first + count)
                assert same_bits(op(rows[here]), everything[here]), f"{count} rows at {first}"
                assert same_bits(op(strided[here]), everything[here]), f"{count} strided rows"

    return check


@pytest.fixture
def relative_error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Largest difference over the largest value of the float64 reference."""

    def measure(value: torch.Tensor, reference: torch.Tensor) -> float:
        value, reference = value.detach(), reference.detach()
        return float((value.double() - reference).abs().max() / reference.abs().max())

    return measure


@pytest.fixture
def tolerance(dtype: torch.dtype) -> float:
    """Allowed `relative_error`: float32 sums of a few hundred terms, bfloat16's 8 bits."""
    return 1e-5 if dtype == torch.float32 else 2e-2
