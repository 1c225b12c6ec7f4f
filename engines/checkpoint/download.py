"""Brings a model or a data set into a run's own folder, with a manifest of what arrived.

Sources are `generated:tiny` and `generated:arithmetic`, a local folder or file, a file of data on a
web server (`engines.checkpoint.fetch`), and `hf://org/name@revision` of a model, through
huggingface_hub, so that HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are honoured. There a
connection that breaks is taken up again at the last whole chunk; files that arrived whole are not
fetched again by a later attempt. What the hub sent is hashed and compared with the hash that the
hub states, which its client does not do. A folder appears under its name complete and checked, or
not at all; asking again verifies it by content.

Usage::

    model = download_model(spec.model, leg / "model")     # .weights_digest, .tokenizer_digest
    data = download_data(spec.data, leg / "data")         # .digest; holds "<split>.jsonl"
    model.pinned_source                                   # hf://org/name@COMMIT
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from engines.checkpoint.fetch import fetch
from engines.checkpoint.folders import weight_files
from engines.checkpoint.tiny_model import write_tiny_model
from engines.data import arithmetic_rows, data_file, load_rows, selected_rows, write_rows
from engines.provenance.digest import digest_json, sha256_file
from model_specs.data_spec import DATA_SUFFIXES
from model_specs.errors import ArtifactError, SpecError
from model_specs.json_text import read_json
from model_specs.model_spec import ModelSpec
from model_specs.registry import check_config
from model_specs.run_spec import DataSpec
from model_specs.sources import HubSource, from_hub, is_url, parse_hub

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "config.json")
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)
"""`generation_config.json` is here because its end-of-sequence ids decide where a text ends."""
_OTHER_PATTERNS = ("LICENSE*",)
MODEL_PATTERNS = (*WEIGHT_PATTERNS, *TOKENIZER_PATTERNS, *_OTHER_PATTERNS)
"""All that is taken from a model's source; other formats of the weights stay behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """What a folder holds, and where it came from."""

    folder: str
    source: str
    revision: str | None
    """Commit that a hub revision stood for when it was downloaded; None for other sources."""
    files: Mapping[str, tuple[str, int]]
    """File name -> (SHA-256, size in bytes)."""

    @property
    def pinned_source(self) -> str:
        """The source, with the commit in place of a branch or tag that can move."""
        hub = parse_hub(self.source)
        return self.source if hub is None or self.revision is None else hub.at(self.revision)

    def digest_of(self, patterns: tuple[str, ...]) -> str:
        """Return one digest over the names and contents of the files that match a pattern."""
        return digest_json(
            {
                name: sha256
                for name, (sha256, _) in self.files.items()
                if any(fnmatch(name, pattern) for pattern in patterns)
            }
        )

    @property
    def weights_digest(self) -> str:
        """Identity of the weights: safetensors files, their index and config.json."""
        return self.digest_of(WEIGHT_PATTERNS)

    @property
    def tokenizer_digest(self) -> str:
        """Identity of the tokenizer, its chat template and the end-of-sequence ids."""
        return self.digest_of(TOKENIZER_PATTERNS)

    @property
    def digest(self) -> str:
        """Of a data set: SHA-256 of its one file. Of a model: over all files."""
        if len(self.files) == 1:
            return next(iter(self.files.values()))[0]
        return self.digest_of(("*",))


def download_model(spec: ModelSpec, folder: str | Path) -> Download:
    """Materialise `spec.path` at `folder`, checked against `spec` and by whole weight files.

    Raises:
        SpecError: For an unknown source, or a config.json that is not the model of `spec`.
        ArtifactError: For a missing shard, a truncated file, an unreachable hub, digests other than
            the spec's, or an existing folder that is not what its manifest says.
    """

    def fill(partial: Path) -> str | None:
        if spec.path.startswith("generated:"):
            if spec.path != "generated:tiny":
                raise SpecError(
                    f"model.path={spec.path!r}: the only generated model is 'generated:tiny'"
                )
            write_tiny_model(partial, spec)
            return None
        hub = parse_hub(spec.path)
        if hub is not None:
            snapshot = _hub_snapshot(spec.path, hub)
            _take_files(snapshot, partial, source_name=spec.path)
            return snapshot.name
        _take_files(Path(spec.path).expanduser(), partial, source_name=spec.path)
        return None

    def check(partial: Path) -> None:
        config_file = partial / "config.json"
        check_config(spec, read_json(config_file), where=f"{spec.path}: config.json")
        weight_files(partial)

    result = _materialise(spec.path, Path(folder), fill=fill, check=check)
    for field, wanted, found in (
        ("model.weights_digest", spec.weights_digest, result.weights_digest),
        ("model.tokenizer_digest", spec.tokenizer_digest, result.tokenizer_digest),
    ):
        _require_digest(field, wanted, found, result)
    return result


def download_data(spec: DataSpec, folder: str | Path) -> Download:
    """Materialise the one file `<split>.jsonl` or `<split>.parquet` of `spec.source` at `folder`.

    Raises:
        SpecError: For an unknown generated data set or split, or rows that leave nothing.
        ArtifactError: For a missing or malformed file, or a digest other than the spec's.
    """

    def fill(partial: Path) -> str | None:
        if spec.source.startswith("generated:"):
            if spec.source != "generated:arithmetic":
                raise SpecError(
                    f"data.source={spec.source!r}: the only generated set is 'generated:arithmetic'"
                )
            write_rows(partial / f"{spec.split}.jsonl", arithmetic_rows(spec.split))
            return None
        if is_url(spec.source):
            _fetch_data(spec, partial)
            return None
        file = data_file(Path(spec.source).expanduser(), split=spec.split)
        shutil.copyfile(file, partial / f"{spec.split}{file.suffix}")
        return None

    def check(partial: Path) -> None:
        rows, _ = load_rows(data_file(partial, split=spec.split))
        selected_rows(len(rows), spec.rows)

    result = _materialise(spec.source, Path(folder), fill=fill, check=check)
    _require_digest("data.digest", spec.digest, result.digest, result)
    return result


def _fetch_data(spec: DataSpec, partial: Path) -> None:
    """Fetch the file that `spec.source` names, or `<split>.jsonl` of the folder that it names."""
    is_file = spec.source.endswith(DATA_SUFFIXES)
    url = spec.source if is_file else f"{spec.source.rstrip('/')}/{spec.split}.jsonl"
    fetch(url, partial / f"{spec.split}{Path(url).suffix}")


def verify_download(folder: str | Path) -> Download:
    """Re-hash every file of a downloaded folder and compare with its manifest.

    Raises:
        ArtifactError: Naming the files that are missing, changed or not in the manifest.
    """
    place = Path(folder)
    manifest = read_json(place / MANIFEST)
    if manifest.get("schema_version") != MANIFEST_VERSION:
        raise ArtifactError(
            f"{place / MANIFEST} has schema_version {manifest.get('schema_version')!r}; this "
            f"version reads {MANIFEST_VERSION}"
        )
    recorded = {name: (entry["sha256"], entry["size"]) for name, entry in manifest["files"].items()}
    found = _hashed_files(place)
    problems = [f"{name} is missing" for name in sorted(recorded.keys() - found.keys())]
    problems += [
        f"{name} is not in the manifest" for name in sorted(found.keys() - recorded.keys())
    ]
    problems += [
        f"{name} is {found[name]}, recorded {recorded[name]}"
        for name in sorted(found.keys() & recorded.keys())
        if found[name] != recorded[name]
    ]
    if problems:
        raise ArtifactError(
            f"{place} is not what its manifest says: {'; '.join(problems)}; delete the folder and "
            "download again"
        )
    return Download(
        folder=str(place), source=manifest["source"], revision=manifest["revision"], files=found
    )


def _materialise(
    source: str,
    folder: Path,
    *,
    fill: Callable[[Path], str | None],
    check: Callable[[Path], None],
) -> Download:
    """Fill and check a folder aside, write its manifest, rename it; or verify one that exists."""
    if folder.exists():
        existing = verify_download(folder)
        if source not in (existing.source, existing.pinned_source):
            raise ArtifactError(f"{folder} holds {existing.source!r}, not {source!r}")
        check(folder)
        return existing
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        revision = fill(partial)
        check(partial)
        files = _hashed_files(partial)
        manifest = {
            "schema_version": MANIFEST_VERSION,
            "source": source,
            "revision": revision,
            "files": {name: {"sha256": sha, "size": size} for name, (sha, size) in files.items()},
        }
        text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Download(folder=str(folder), source=source, revision=revision, files=files)


def _hashed_files(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        file.name: (sha256_file(file), file.stat().st_size)
        for file in sorted(folder.iterdir())
        if file.is_file() and file.name != MANIFEST
    }


def _take_files(source: Path, partial: Path, *, source_name: str) -> None:
    """Copy the files of a model folder.

    Never linked: legs share nothing, and a source that is rewritten in place must not reach them.
    """
    if not source.is_dir():
        raise ArtifactError(
            f"model source {source_name!r} is no folder; name a folder, hf://org/name@revision or "
            "generated:tiny by `--set model.path=SOURCE`"
        )
    for file in sorted(source.iterdir()):
        if not file.is_file() or not any(fnmatch(file.name, pattern) for pattern in MODEL_PATTERNS):
            continue
        shutil.copyfile(file, partial / file.name)


def _hub_snapshot(source: str, hub: HubSource) -> Path:
    """Return the folder in the hub's cache, named by the commit, that holds the files of `hub`."""
    import huggingface_hub

    snapshot = Path(
        from_hub(
            source,
            lambda: huggingface_hub.snapshot_download(
                hub.repository, revision=hub.revision, allow_patterns=list(MODEL_PATTERNS)
            ),
        )
    )
    for file in sorted(snapshot.iterdir()):
        if file.is_file():
            _check_blob(file, source)
    return snapshot


def _check_blob(file: Path, source: str) -> None:
    """Compare a file of the hub's cache with the hash that the hub stated for it.

    The cache names a blob by that hash and links to it: SHA-256 for a large file, Git's own hash of
    a blob (SHA-1) for a small one.
    """
    blob = file.resolve()
    stated = blob.name
    if re.fullmatch("[0-9a-f]{64}", stated):
        found = sha256_file(blob)
    elif re.fullmatch("[0-9a-f]{40}", stated):
        content = blob.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    else:
        raise ArtifactError(
            f"{source}: {file} is not linked to a blob that is named by its hash, so what arrived "
            "cannot be checked; use a cache folder (HF_HOME) on a file system with symbolic links"
        )
    if found != stated:
        raise ArtifactError(
            f"{source}: {file.name} has hash {found}, but the hub states {stated}; what arrived is "
            f"not what was published: delete {blob} and download again"
        )


def _require_digest(field: str, wanted: str | None, found: str, result: Download) -> None:
    if wanted is None or wanted == found:
        return
    hub = parse_hub(result.source)
    moved = ""
    if hub is not None and not hub.is_pinned:
        moved = f" (revision {hub.revision!r} stands for commit {result.revision} now)"
    raise ArtifactError(
        f"{result.source}: {field} is {wanted} in the spec but {found} in the folder{moved}; the "
        "content changed: name the right source or commit, or clear the field to accept the new "
        "content"
    )
