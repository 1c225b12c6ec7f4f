"""Hugging Face folder -> DCP checkpoint of float32 masters, and back bit for bit.

The DCP folder holds `{"model": {hf name: float32 tensor}}` and nothing else: the state before the
first step. float32 holds every bfloat16 value, so the way back to the stored dtype loses nothing.

Usage::

    digests = convert_hf_to_dcp(model_dir, dcp_dir, spec.model)
    dcp_to_hf(dcp_dir, out_dir, model_dir, spec.model, "bfloat16")
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from engines.checkpoint.hf import read_hf_state, write_hf_folder
from engines.provenance.tensor_digest import digest_tensors
from model_specs.errors import ArtifactError, CheckpointError
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import RunSpec

AnySpec = ModelSpec | RunSpec | str
"""The model, a run, or a run as JSON."""

MODEL_PREFIX = "model."
"""A parameter's key in the DCP metadata is this and its Hugging Face name."""


def model_of(spec: AnySpec) -> ModelSpec:
    """Return the model of a spec; a str is a `RunSpec` as JSON."""
    if isinstance(spec, ModelSpec):
        return spec
    return (spec if isinstance(spec, RunSpec) else RunSpec.model_validate_json(spec)).model


def convert_hf_to_dcp(model_dir: str | Path, dcp_dir: str | Path, spec: AnySpec) -> dict[str, str]:
    """Write the weights of `model_dir` as float32 masters; return name -> digest of the masters.

    The folder is complete under `dcp_dir` or not there at all; it is read back and its digests
    compared before it is renamed.

    Raises:
        SpecError: When config.json is not the model of `spec`, with every differing field.
        ArtifactError: When the weights are not, or `dcp_dir` exists.
        CheckpointError: When what was read back is not what was written.
    """
    model, out = model_of(spec), Path(dcp_dir)
    if out.exists():
        raise ArtifactError(f"{out} exists already; remove it or name another folder")
    stored = read_hf_state(model_dir, model)
    masters = {name: tensor.to(torch.float32) for name, tensor in stored.items()}
    digests = digest_tensors(masters)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        checkpoint.save({"model": masters}, checkpoint_id=partial, no_dist=True)
        del masters, stored
        written = digest_tensors(read_dcp_model(partial, model))
        if written != digests:
            wrong = sorted(name for name in digests if written[name] != digests[name])
            raise CheckpointError(
                f"{partial}: {len(wrong)} tensors read back other than they were written; the "
                f"first is {wrong[0]}; check the disk"
            )
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return digests


def read_dcp_model(dcp_dir: str | Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return name -> float32 master of the model part of a DCP folder, sorted by name.

    Optimizer state and whatever else the folder holds is left alone.

    Raises:
        CheckpointError: When it is no DCP folder, or its model part has other names, shapes or
            dtypes than `spec` implies.
    """
    folder = Path(dcp_dir)
    expected = parameter_shapes(spec)
    held = _model_metadata(folder)
    problems = [f"missing: {name}" for name in sorted(expected.keys() - held.keys())]
    problems += [f"unknown: {name}" for name in sorted(held.keys() - expected.keys())]
    for name in sorted(expected.keys() & held.keys()):
        shape, dtype = tuple(held[name].size), held[name].properties.dtype
        if shape != expected[name] or dtype != torch.float32:
            problems.append(f"{name} is {shape} {dtype}, the spec implies {expected[name]} float32")
    if problems:
        raise CheckpointError(
            f"{folder} does not hold the model of the spec: {'; '.join(problems)}"
        )
    state = {name: torch.empty(shape, dtype=torch.float32) for name, shape in expected.items()}
    checkpoint.load({"model": state}, checkpoint_id=folder, no_dist=True)
    return state


def _model_metadata(folder: Path) -> dict[str, Any]:
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} is no DCP checkpoint: it has no .metadata file")
    entries = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key.removeprefix(MODEL_PREFIX): entry
        for key, entry in entries.items()
        if key.startswith(MODEL_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }


def dcp_to_hf(
    dcp_dir: str | Path,
    out_dir: str | Path,
    model_dir_for_assets: str | Path,
    spec: AnySpec,
    dtype: str,
) -> dict[str, str]:
    """Write the model part of a DCP folder as a Hugging Face folder; return name -> digest.

    Masters are rounded to `dtype` (to nearest even); the digests are of what is written.

    Args:
        dcp_dir: DCP folder with a `model` part.
        out_dir: Must not exist yet; complete or not there at all.
        model_dir_for_assets: Folder whose config.json and tokenizer are taken over.
        spec: The model or its run; names and shapes must be exactly its own.
        dtype: `float32` or `bfloat16`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ArtifactError(f"cannot write weights as {dtype!r}; choose float32 or bfloat16")
    masters = read_dcp_model(dcp_dir, model_of(spec))
    state = {name: master.to(getattr(torch, dtype)) for name, master in masters.items()}
    digests = digest_tensors(state)
    write_hf_folder(out_dir, state, assets_dir=model_dir_for_assets, dtype=dtype)
    return digests


def digest_dcp_model(dcp_dir: str | Path, spec: ModelSpec) -> dict[str, str]:
    """Return name -> digest of the masters that a DCP folder holds, read back from it."""
    return digest_tensors(read_dcp_model(dcp_dir, spec))
