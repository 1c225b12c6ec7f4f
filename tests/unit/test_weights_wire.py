"""Buckets: the same names, dtypes, shapes and bits come out, whatever their size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.weights.wire import pack, resolve, unpack
from model_specs.errors import EngineError


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(600, 700, generator=generator)
    return {
        "float32": wide,
        "bfloat16": wide.to(torch.bfloat16),
        "transposed": wide.T,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, 0.0]),
    }


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("bucket_mib", [1, 2, 64])
def test_what_comes_out_is_what_went_in(bucket_mib: int) -> None:
    sent = _tensors()
    buckets = list(pack(sent.items(), bucket_mib=bucket_mib))
    received = [item for bucket in resolve(buckets) for item in unpack(bucket)]
    assert [name for name, _ in received] == list(sent)
    for name, tensor in received:
        assert tensor.dtype == sent[name].dtype
        assert tensor.shape == sent[name].shape
        assert _bits(tensor) == _bits(sent[name])


def test_a_bucket_holds_at_most_its_size_and_a_larger_tensor_alone() -> None:
    buckets = list(pack(_tensors().items(), bucket_mib=1))
    for bucket in buckets:
        size = sum(wire.data.nbytes for wire in bucket)
        assert size <= 2**20 or len(bucket) == 1
    assert len(buckets) > len(list(pack(_tensors().items(), bucket_mib=64))) == 1


def test_a_truncated_tensor_is_refused() -> None:
    (bucket,) = pack([("w", torch.ones(3, 4))], bucket_mib=1)
    torn = replace(bucket[0], data=bucket[0].data[:-4])
    with pytest.raises(EngineError, match=r"w: 44 bytes arrived.*needs 48"):
        list(unpack((torn,)))


def test_an_unknown_dtype_is_refused() -> None:
    (bucket,) = pack([("w", torch.ones(3))], bucket_mib=1)
    with pytest.raises(EngineError, match="unknown wire dtype 'float31'"):
        list(unpack((replace(bucket[0], dtype="float31"),)))
