"""Exports a checkpoint as a Hugging Face folder, and checks that it is the trained model.

Every written tensor is traceable: the names are those of the checkpoint's model part, both ways,
and each digest is that of the trained value in the exported dtype. The folder is then read twice,
as files and through transformers; both must give the same digests, and a folder that fails is
removed.

Usage::

    digests = export_checkpoint(checkpoint_dir, out_dir, model_dir, spec)
    verify_export(out_dir, digests, spec)     # the last step's `sent` digests do as well
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engines.checkpoint.convert import AnySpec, dcp_to_hf, model_of
from engines.checkpoint.hf import EMBEDDING, HEAD, load_hf_state
from engines.provenance.tensor_digest import digest_tensors
from model_specs.errors import ArtifactError
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import RunSpec


def export_checkpoint(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    assets_dir: str | Path,
    spec: AnySpec,
    *,
    dtype: str | None = None,
) -> dict[str, str]:
    """Write and verify the export; return name -> digest of each exported tensor.

    Args:
        checkpoint_dir: DCP folder with a `model` part.
        out_dir: Must not exist yet.
        assets_dir: Folder whose config.json and tokenizer are taken over.
        spec: The run (also as JSON), or the trained model.
        dtype: Exported dtype; None takes the run's compute dtype, so that the digests are those of
            the last push of weights, or the stored dtype where `spec` is only a model.

    Raises:
        CheckpointError: When the checkpoint does not hold the model of `spec`.
        ArtifactError: When the written folder does not read back as what was trained.
    """
    if isinstance(spec, str):
        spec = RunSpec.model_validate_json(spec)
    default = spec.numerics.compute_dtype if isinstance(spec, RunSpec) else spec.dtype
    chosen = dtype or default
    digests = dcp_to_hf(checkpoint_dir, out_dir, assets_dir, spec, chosen)
    try:
        verify_export(out_dir, digests, spec)
    except BaseException:  # whatever the reader raises: what was not verified is no export
        shutil.rmtree(out_dir, ignore_errors=True)
        raise
    return digests


def digest_export(out_dir: str | Path) -> dict[str, str]:
    """Return name -> digest of the tensors that an exported folder holds."""
    return digest_tensors(load_hf_state(out_dir))


def verify_export(out_dir: str | Path, expected: Mapping[str, str], spec: AnySpec) -> None:
    """Require that the folder holds exactly the tensors with the `expected` name -> digest.

    Raises:
        ArtifactError: Naming tensors that are missing, not traceable to a trained one, or of other
            bits, as files or as transformers loads them.
    """
    stored = digest_export(out_dir)
    _require_equal(stored, expected, where=f"{out_dir} (files)")
    loaded = digest_tensors(_transformers_state(out_dir, model_of(spec)))
    _require_equal(loaded, expected, where=f"{out_dir} (as transformers loads it)")


def _transformers_state(out_dir: str | Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out_dir, dtype="auto", local_files_only=True)
    state = dict(model.state_dict())
    if spec.num_experts:
        state = dict(unstacked_experts(state))
    if spec.tie_word_embeddings:
        tied = state.pop(HEAD, None)
        if tied is None or tied.data_ptr() != state[EMBEDDING].data_ptr():
            raise ArtifactError(
                f"{out_dir}: the spec says tie_word_embeddings=true but transformers loads a head "
                "of its own; its config.json must say so too"
            )
    return state


def unstacked_experts(
    state: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield transformers' state with stacked experts as the matrices that checkpoints name."""
    for name, tensor in state.items():
        prefix, separator, kind = name.rpartition(".experts.")
        if not separator or kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, view in parts.items():
                yield f"{prefix}.experts.{expert}.{part}.weight", view


def _require_equal(found: Mapping[str, str], expected: Mapping[str, str], *, where: str) -> None:
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [
        f"{name} is not traceable to a trained tensor"
        for name in sorted(found.keys() - expected.keys())
    ]
    problems += [
        f"{name} has digest {found[name]}, trained is {expected[name]}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    if problems:
        shown = "; ".join(problems[:5])
        raise ArtifactError(f"{where}: {len(problems)} tensors are not the trained ones: {shown}")
