"""Hugging Face model folders: checked before they are read, written with the same names and dtypes.

Invariant: what `read_hf_state` returns has exactly the names, shapes and dtype that the `ModelSpec`
implies; a tied head is not among them, and one that is stored but is not its embedding is refused.

Usage::

    state = read_hf_state(model_dir, spec.model)    # name -> tensor, in the stored dtype
    write_hf_folder(out_dir, state, assets_dir=model_dir, dtype="bfloat16")
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engines.checkpoint.folders import weight_files
from model_specs.errors import ArtifactError
from model_specs.families.decoder import parameter_shapes
from model_specs.json_text import read_json
from model_specs.model_spec import ModelSpec
from model_specs.registry import check_config

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MAX_SHARD_BYTES = 5 * 2**30
"""A folder above this size is written as several files and an index."""

ASSET_PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "LICENSE*",
)
"""Files beside the weights that an export takes over unchanged."""


def load_hf_state(model_dir: str | Path) -> dict[str, torch.Tensor]:
    """Return name -> tensor of every tensor that the folder stores, sorted by name, as stored.

    Raises:
        ArtifactError: For a missing shard, a truncated file, or a tensor stored twice.
    """
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(model_dir):
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 -- the reader is no mapping
                if name in state:
                    raise ArtifactError(f"{file}: tensor {name!r} is stored in another file too")
                state[name] = reader.get_tensor(name)
    return dict(sorted(state.items()))


def read_hf_state(model_dir: str | Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the parameters of the model of `spec`, checked; config.json is compared first.

    A head that is stored although it is tied is dropped when it is bitwise the embedding.

    Raises:
        SpecError: When config.json is not the model of `spec`, with every differing field.
        ArtifactError: When tensors are missing, unknown, or of another shape or dtype.
    """
    folder = Path(model_dir)
    check_config(spec, read_json(folder / "config.json"), where=str(folder / "config.json"))
    state = load_hf_state(folder)
    if spec.tie_word_embeddings and HEAD in state:
        if not bitwise_equal(state[HEAD], state.get(EMBEDDING)):
            raise ArtifactError(
                f"{folder}: {HEAD} is stored and differs from {EMBEDDING}, but the spec says "
                "tie_word_embeddings=true; the head is untied: correct config.json and the spec"
            )
        del state[HEAD]
    check_state(state, spec, where=str(folder))
    wrong = [name for name, tensor in state.items() if _dtype(tensor) != spec.dtype]
    if wrong:
        raise ArtifactError(
            f"{folder}: {len(wrong)} of {len(state)} tensors are not stored as {spec.dtype}; the "
            f"first is {wrong[0]} as {_dtype(state[wrong[0]])}; set model.dtype to what is stored"
        )
    return state


def check_state(state: Mapping[str, torch.Tensor], spec: ModelSpec, *, where: str) -> None:
    """Require exactly the names and shapes that `spec` implies.

    Raises:
        ArtifactError: Naming all missing and unknown tensors and every wrong shape.
    """
    expected = parameter_shapes(spec)
    problems = []
    missing, unknown = (
        sorted(expected.keys() - state.keys()),
        sorted(state.keys() - expected.keys()),
    )
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if unknown:
        problems.append(f"unknown: {', '.join(unknown)}")
    for name in sorted(expected.keys() & state.keys()):
        found = tuple(state[name].shape)
        if found != expected[name]:
            hint = " (vocabulary padding lost or added)" if name in (EMBEDDING, HEAD) else ""
            problems.append(f"{name} is {found}, the spec implies {expected[name]}{hint}")
    if problems:
        raise ArtifactError(f"{where} does not hold the model of the spec: {'; '.join(problems)}")


def bitwise_equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Return whether both have one dtype, shape and bit pattern (-0 is not 0)."""
    if b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits_a, bits_b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return bool(torch.equal(bits_a, bits_b))


def write_hf_folder(
    out_dir: str | Path,
    state: Mapping[str, torch.Tensor],
    *,
    assets_dir: str | Path,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights, config and assets; complete under `out_dir` or not there at all.

    Args:
        out_dir: Must not exist yet.
        state: Name -> tensor, already of `dtype`.
        assets_dir: Folder whose config.json (with `dtype` replaced) and tokenizer are taken over.
        dtype: `float32` or `bfloat16`.
        max_shard_bytes: Largest weight file; tensors keep their sorted order over the files.

    Raises:
        ArtifactError: When `out_dir` exists, or `assets_dir` has no config.json.
    """
    out, assets = Path(out_dir), Path(assets_dir)
    if out.exists():
        raise ArtifactError(f"{out} exists already; remove it or name another folder")
    config = read_json(assets / "config.json")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_weights(partial, state, max_shard_bytes)
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for pattern in ASSET_PATTERNS:
            for file in sorted(assets.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(folder: Path, state: Mapping[str, torch.Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in sorted(state.items()):
        if shards[-1] and used + tensor.nbytes > max_shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor.contiguous()
        used += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in state.values())
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
