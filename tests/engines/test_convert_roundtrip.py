"""Hugging Face -> DCP -> Hugging Face loses no bit, and export is the trained model or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

from engines.checkpoint.convert import convert_hf_to_dcp, dcp_to_hf, read_dcp_model
from engines.checkpoint.export import export_checkpoint, verify_export
from engines.checkpoint.hf import bitwise_equal, load_hf_state, read_hf_state, write_hf_folder
from engines.checkpoint.tiny_model import config_json, write_tiny_model
from engines.provenance.tensor_digest import digest_tensors
from model_specs.errors import ArtifactError, CheckpointError, SpecError
from model_specs.model_spec import ModelSpec
from model_specs.registry import load_recipe

torch.set_num_threads(1)

RUN = load_recipe("tiny_cpu")
QWEN2 = RUN.model
LLAMA = QWEN2.model_copy(
    update={
        "family": "llama",
        "qkv_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _model(folder: Path, spec: ModelSpec = QWEN2) -> Path:
    write_tiny_model(folder, spec)
    return folder


def _change(folder: Path, spec: ModelSpec = QWEN2, **tensors: torch.Tensor | None) -> Path:
    """Rewrite the weights with some tensors replaced, added, or removed by None."""
    state = load_file(_model(folder, spec) / "model.safetensors")
    state |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name in [name for name, tensor in tensors.items() if tensor is None]:
        del state[name]
    save_file(state, folder / "model.safetensors")
    return folder


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(bitwise_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("spec", [QWEN2, LLAMA], ids=["qwen2-tied-bf16", "llama-untied-fp32"])
def test_the_way_to_dcp_and_back_is_bitwise(tmp_path: Path, spec: ModelSpec) -> None:
    source = _model(tmp_path / "model", spec)
    digests = convert_hf_to_dcp(source, tmp_path / "dcp", spec)
    masters = read_dcp_model(tmp_path / "dcp", spec)
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert digest_tensors(masters) == digests
    dcp_to_hf(tmp_path / "dcp", tmp_path / "back", source, spec, spec.dtype)
    assert _equal(load_hf_state(source), load_hf_state(tmp_path / "back"))
    assert _equal(read_hf_state(tmp_path / "back", spec), read_hf_state(source, spec))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["back", "dcp", "model"]


def test_a_run_as_json_is_taken_for_its_model(tmp_path: Path) -> None:
    source = _model(tmp_path / "model")
    a = convert_hf_to_dcp(source, tmp_path / "a", RUN.model_dump_json())
    b = convert_hf_to_dcp(source, tmp_path / "b", QWEN2)
    assert a == b


def test_bitwise_equality_sees_the_sign_of_zero_and_one_bit() -> None:
    zero = torch.zeros(3, dtype=torch.bfloat16)
    assert bitwise_equal(zero, zero.clone())
    assert not bitwise_equal(zero, -zero)
    flipped = zero.clone()
    flipped.view(torch.int16)[1] ^= 1
    assert not bitwise_equal(zero, flipped)
    assert not bitwise_equal(zero, zero.float())
    assert bitwise_equal(torch.full((2,), float("nan")), torch.full((2,), float("nan")))


def test_a_config_that_differs_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    wrong = QWEN2.model_copy(update={"hidden_size": 96, "rope_theta": 5e5})
    with pytest.raises(SpecError, match=r"hidden_size: spec 96.*128; rope_theta: spec 500000\.0"):
        convert_hf_to_dcp(_model(tmp_path / "model"), tmp_path / "dcp", wrong)
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_lost_vocabulary_padding_is_refused_with_both_shapes(tmp_path: Path) -> None:
    rows = load_file(_model(tmp_path / "model") / "model.safetensors")[EMBEDDING][:97]
    source = _change(tmp_path / "model", **{EMBEDDING: rows.clone()})
    with pytest.raises(ArtifactError, match=r"\(97, 128\).*\(100, 128\) \(vocabulary padding lost"):
        convert_hf_to_dcp(source, tmp_path / "dcp", QWEN2)
    assert not (tmp_path / "dcp").exists()


def test_a_tied_head_may_be_stored_only_as_its_embedding(tmp_path: Path) -> None:
    embedding = load_file(_model(tmp_path / "model") / "model.safetensors")[EMBEDDING]
    alias = _change(tmp_path / "alias", **{HEAD: embedding.clone()})
    assert HEAD not in read_hf_state(alias, QWEN2)
    other = embedding.clone()
    other[0, 0] += 1
    with pytest.raises(ArtifactError, match=r"lm_head\.weight is stored and differs.*untied"):
        read_hf_state(_change(tmp_path / "untied", **{HEAD: other}), QWEN2)


def test_a_missing_head_of_an_untied_model_is_refused(tmp_path: Path) -> None:
    source = _change(tmp_path / "model", LLAMA, **{HEAD: None})
    with pytest.raises(ArtifactError, match=r"missing: lm_head\.weight"):
        convert_hf_to_dcp(source, tmp_path / "dcp", LLAMA)


def test_unknown_tensors_and_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"unknown: model\.extra"):
        read_hf_state(_change(tmp_path / "a", **{"model.extra": torch.zeros(2)}), QWEN2)
    norm = torch.ones(128, dtype=torch.float32)
    with pytest.raises(ArtifactError, match=r"1 of 26.*bfloat16.*model\.norm\.weight as float32"):
        read_hf_state(_change(tmp_path / "b", **{"model.norm.weight": norm}), QWEN2)


def test_a_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    source = _model(tmp_path / "model")
    state = load_hf_state(source)
    write_hf_folder(
        tmp_path / "sharded", state, assets_dir=source, dtype="bfloat16", max_shard_bytes=60_000
    )
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    assert _equal(load_hf_state(tmp_path / "sharded"), state)
    digests = convert_hf_to_dcp(tmp_path / "sharded", tmp_path / "dcp", QWEN2)
    assert digests == convert_hf_to_dcp(source, tmp_path / "whole", QWEN2)


def test_an_existing_target_is_never_overwritten(tmp_path: Path) -> None:
    source = _model(tmp_path / "model")
    (tmp_path / "dcp").mkdir()
    with pytest.raises(ArtifactError, match="exists already"):
        convert_hf_to_dcp(source, tmp_path / "dcp", QWEN2)
    with pytest.raises(ArtifactError, match="exists already"):
        write_hf_folder(source, {}, assets_dir=source, dtype="bfloat16")


def test_a_failing_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _model(tmp_path / "model")

    def torn(*args: object, checkpoint_id: Path, **kwargs: object) -> None:
        checkpoint_id.mkdir(exist_ok=True)
        (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("engines.checkpoint.convert.checkpoint.save", torn)
    with pytest.raises(OSError, match="disk full"):
        convert_hf_to_dcp(source, tmp_path / "dcp", QWEN2)
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_a_dcp_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    convert_hf_to_dcp(_model(tmp_path / "model"), tmp_path / "dcp", QWEN2)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2"):
        read_dcp_model(tmp_path / "dcp", QWEN2.model_copy(update={"num_layers": 3}))
    with pytest.raises(CheckpointError, match=r"is \(176, 128\) torch\.float32.*\(192, 128\)"):
        read_dcp_model(tmp_path / "dcp", QWEN2.model_copy(update={"intermediate_size": 192}))
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        read_dcp_model(tmp_path / "model", QWEN2)


def _trained(tmp_path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Return (model folder, checkpoint with optimizer state, its masters)."""
    source = _model(tmp_path / "model")
    convert_hf_to_dcp(source, tmp_path / "dcp", QWEN2)
    masters = {
        name: master + 1e-4 * torch.arange(master.numel()).reshape(master.shape)
        for name, master in read_dcp_model(tmp_path / "dcp", QWEN2).items()
    }
    moments = {f"exp_avg.{name}": torch.zeros_like(master) for name, master in masters.items()}
    state = {"model": masters, "optimizer": moments, "progress": {"step": torch.tensor(4)}}
    checkpoint.save(state, checkpoint_id=tmp_path / "step-000004", no_dist=True)
    return source, tmp_path / "step-000004", masters


def test_export_is_the_trained_model_rounded_to_the_wire_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, trained, masters = _trained(tmp_path)
    digests = export_checkpoint(trained, tmp_path / "export", source, RUN.model_dump_json())
    wire = {name: master.to(torch.bfloat16) for name, master in masters.items()}
    assert digests == digest_tensors(wire)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert bitwise_equal(model.model.norm.weight.data, wire["model.norm.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert model.generation_config.eos_token_id == 3


def test_export_takes_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    source, trained, masters = _trained(tmp_path)
    digests = export_checkpoint(trained, tmp_path / "export", source, QWEN2, dtype="float32")
    assert digests == digest_tensors(masters)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(ArtifactError, match="'int4'"):
        export_checkpoint(trained, tmp_path / "other", source, QWEN2, dtype="int4")


def test_one_flipped_bit_or_name_in_an_export_is_found(tmp_path: Path) -> None:
    source, trained, _ = _trained(tmp_path)
    out = tmp_path / "export"
    digests = export_checkpoint(trained, out, source, QWEN2)
    verify_export(out, digests, QWEN2)
    state = load_file(out / "model.safetensors")
    state["model.norm.weight"].view(torch.int16)[5] ^= 1
    save_file(state, out / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"1 tensors.*model\.norm\.weight has digest"):
        verify_export(out, digests, QWEN2)
    state["model.extra"] = state.pop("model.norm.weight")
    save_file(state, out / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"norm\.weight is missing; model\.extra is not trace"):
        verify_export(out, digests, QWEN2)


def test_an_export_that_transformers_unties_is_refused_and_removed(tmp_path: Path) -> None:
    source, trained, _ = _trained(tmp_path)
    untied = config_json(QWEN2) | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(untied))
    with pytest.raises(ArtifactError, match="transformers loads a head of its own"):
        export_checkpoint(trained, tmp_path / "export", source, QWEN2)
    assert not (tmp_path / "export").exists()
