"""What is downloaded arrives whole, checked and under its final name, or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from engines.checkpoint.download import (
    download_data,
    download_model,
    verify_download,
)
from engines.checkpoint.folders import safetensors_header, weight_files
from engines.checkpoint.tiny_model import CHARACTERS, write_tiny_model
from model_specs.errors import ArtifactError, SpecError
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

RUN = load_recipe("tiny_cpu")
MODEL = RUN.model


def _at(path: Path | str) -> RunSpec:
    return RUN.model_copy(update={"model": MODEL.model_copy(update={"path": str(path)})})


def _sharded(folder: Path) -> Path:
    """A folder whose weights are two files and an index."""
    from safetensors.torch import load_file, save_file

    write_tiny_model(folder, MODEL)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {}
    for number, part in enumerate((names[:10], names[10:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_generated_model_is_the_same_on_every_machine(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, MODEL)
    sha256 = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert sha256 == "ab9bc9d9dfb16828e046c0de3989a201b60c126b9205f96615b5b488de40b2db"
    write_tiny_model(tmp_path / "other", MODEL, seed=1)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (
        tmp_path / "model.safetensors"
    ).read_bytes()


def test_the_generated_model_has_no_neutral_norm_or_bias(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_tiny_model(tmp_path, MODEL)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        values = tensor.float()
        neutral = 1.0 if name.endswith("norm.weight") else 0.0
        assert ((values - neutral).abs() > 1e-3).float().mean() > 0.9, name
        assert values.unique().numel() > 1, name


def test_the_generated_tokenizer_has_one_token_a_character(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    llama = MODEL.model_copy(update={"family": "llama", "qkv_bias": False})
    for family, spec in (("qwen2", MODEL), ("llama", llama)):
        write_tiny_model(tmp_path / family, spec)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / family)
        text = "".join(CHARACTERS)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(range(4, 100))
        assert tokenizer.decode(range(4, 100)) == text
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": "1 + 2?"}], tokenize=False, add_generation_prompt=True
        )
        assert rendered == "<|start|>user\n1 + 2?<|end|>\n<|start|>assistant\n"
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert ids[0] == 2
        assert ids.count(3) == 1
        assert tokenizer.decode(ids) == rendered
        assert tokenizer.eos_token_id == 3


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"vocab_size=96.*100 tokens"):
        write_tiny_model(tmp_path, MODEL.model_copy(update={"vocab_size": 96}))


def test_asking_again_verifies_and_changes_nothing(tmp_path: Path) -> None:
    model = download_model(RUN.model, tmp_path / "model")
    data = download_data(RUN.data, tmp_path / "data")
    assert model == download_model(RUN.model, tmp_path / "model")
    assert data == download_data(RUN.data, tmp_path / "data")
    file = tmp_path / "data" / "train.jsonl"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == data.digest
    assert sorted(item.name for item in tmp_path.iterdir()) == ["data", "model"]
    assert verify_download(model.folder).weights_digest == model.weights_digest


def test_weights_and_tokenizer_have_digests_of_their_own(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny_model(source, MODEL)
    base = download_model(_at(source).model, tmp_path / "a")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["chat_template"] += " "
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    other = download_model(_at(source).model, tmp_path / "b")
    assert other.weights_digest == base.weights_digest
    assert other.tokenizer_digest != base.tokenizer_digest
    write_tiny_model(source, MODEL, seed=1)
    third = download_model(_at(source).model, tmp_path / "c")
    assert third.weights_digest != base.weights_digest
    assert third.tokenizer_digest == base.tokenizer_digest


def test_other_files_stay_behind_and_the_source_is_not_changed(tmp_path: Path) -> None:
    source = _sharded(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"x")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    result = download_model(_at(source).model, tmp_path / "model")
    assert "pytorch_model.bin" not in result.files
    assert "model-00002-of-00002.safetensors" in result.files
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


def test_a_source_that_is_rewritten_in_place_does_not_reach_the_copy(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "source", MODEL)
    folder = download_model(_at(tmp_path / "source").model, tmp_path / "model").folder
    write_tiny_model(tmp_path / "source", MODEL, seed=1)
    verify_download(folder)


def test_a_missing_shard_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = _sharded(tmp_path / "source")
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"1 of 2 shards are missing: model-00002-of-00002"):
        download_model(_at(source).model, tmp_path / "model")
    assert [item.name for item in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("keep", "message"), [(-1, "truncated"), (6, "truncated"), (200, "trunc")])
def test_a_truncated_file_is_refused_and_nothing_is_left(
    tmp_path: Path, keep: int, message: str
) -> None:
    source = tmp_path / "source"
    write_tiny_model(source, MODEL)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match=message):
        download_model(_at(source).model, tmp_path / "model")
    assert [item.name for item in tmp_path.iterdir()] == ["source"]


def test_broken_and_overlong_files_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, MODEL)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    assert safetensors_header(file)["model.norm.weight"]["shape"] == [128]
    file.write_bytes(content + b"x")
    with pytest.raises(ArtifactError, match="too long"):
        weight_files(tmp_path)
    file.write_bytes(content[:8] + b"!" + content[9:])
    with pytest.raises(ArtifactError, match="broken safetensors header"):
        weight_files(tmp_path)
    file.unlink()
    with pytest.raises(ArtifactError, match="has neither"):
        weight_files(tmp_path)


def test_an_index_that_does_not_match_its_shards_is_refused(tmp_path: Path) -> None:
    source = _sharded(tmp_path / "source")
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=r"'model\.ghost' is named by"):
        weight_files(source)
    index["weight_map"] = {"a": "../elsewhere.safetensors"}
    file.write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="outside of its folder"):
        weight_files(source)


def test_a_model_of_another_shape_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny_model(source, MODEL.model_copy(update={"num_layers": 3}))
    with pytest.raises(SpecError, match=r"num_layers: spec 2, config\.json 3"):
        download_model(_at(source).model, tmp_path / "model")
    assert [item.name for item in tmp_path.iterdir()] == ["source"]


def test_a_changed_missing_or_added_file_is_found_on_verification(tmp_path: Path) -> None:
    folder = Path(download_model(MODEL, tmp_path / "model").folder)
    (folder / "extra.txt").write_text("x")
    with pytest.raises(ArtifactError, match=r"extra\.txt is not in the manifest"):
        verify_download(folder)
    (folder / "extra.txt").unlink()
    config = (folder / "generation_config.json").read_text()
    (folder / "generation_config.json").write_text(config.replace("3", "4"))
    with pytest.raises(ArtifactError, match=r"generation_config\.json is .*recorded"):
        download_model(MODEL, folder)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ArtifactError, match=r"generation_config\.json is missing"):
        verify_download(folder)


def test_content_other_than_the_digest_of_the_spec_is_refused(tmp_path: Path) -> None:
    found = download_model(MODEL, tmp_path / "a")
    digests = {
        "weights_digest": found.weights_digest,
        "tokenizer_digest": found.tokenizer_digest,
    }
    pinned = MODEL.model_copy(update=digests)
    assert download_model(pinned, tmp_path / "b").files == found.files
    for field in digests:
        wrong = pinned.model_copy(update={field: "0" * 32})
        with pytest.raises(ArtifactError, match=f"{field} is 0000.*{digests[field]}"):
            download_model(wrong, tmp_path / "c")
    with pytest.raises(ArtifactError, match=r"data\.digest is 0000"):
        download_data(RUN.data.model_copy(update={"digest": "0" * 64}), tmp_path / "data")


def test_a_leftover_of_a_killed_download_is_cleared(tmp_path: Path) -> None:
    partial = tmp_path / "model.partial"
    partial.mkdir()
    (partial / "stale.safetensors").write_bytes(b"x")
    result = download_model(MODEL, tmp_path / "model")
    assert "stale.safetensors" not in result.files
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("generated:huge", "'generated:tiny'"),
        ("hf://no-organisation", "form hf://org/name@revision"),
        ("/nowhere/at/all", "is no folder"),
    ],
)
def test_an_unknown_source_is_refused_by_name(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        download_model(_at(path).model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_hub_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ArtifactError, match=r"hf://org/name@main could not .*--set model\.path"):
        download_model(_at("hf://org/name@main").model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_data_file_may_be_named_directly(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"messages": [], "label": "1"}\n')
    data = RUN.data.model_copy(update={"source": str(source)})
    result = download_data(data, tmp_path / "data")
    assert list(result.files) == ["train.jsonl"]
    source.write_text("not json\n")
    with pytest.raises(ArtifactError, match="line 1: not JSON"):
        download_data(data, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(SpecError, match="'generated:arithmetic'"):
        download_data(data.model_copy(update={"source": "generated:x"}), tmp_path / "other")


def test_a_parquet_file_arrives_under_the_name_of_its_split(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    source = tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": "1"}], "label": str(i)} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    data = RUN.data.model_copy(update={"source": str(source)})
    result = download_data(data, tmp_path / "data")
    assert list(result.files) == ["train.parquet"]
    assert result.digest == hashlib.sha256(source.read_bytes()).hexdigest()
    assert download_data(data, tmp_path / "data").files == result.files
    with pytest.raises(SpecError, match="leaves none of the 3 rows"):
        download_data(data.model_copy(update={"rows": "3:"}), tmp_path / "other")
    assert not (tmp_path / "other").exists()
