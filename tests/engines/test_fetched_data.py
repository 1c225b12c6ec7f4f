"""Data from a web server: whole and of the digest that the spec names, or an error."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from engines.checkpoint import fetch
from engines.checkpoint.download import download_data
from model_specs.errors import ArtifactError
from model_specs.registry import load_recipe
from model_specs.run_spec import DataSpec

ROWS = b'{"messages": [{"role": "user", "content": "1+1"}], "label": "2"}\n' * 3


class Handler(SimpleHTTPRequestHandler):
    """A folder; files of `fails` answer 503 that many times, those of `short` end too early."""

    fails: ClassVar[dict[str, int]] = {}
    short: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        if self.fails.get(name, 0):
            self.fails[name] -= 1
            self.send_error(503)
        elif name in self.short:
            self.send_response(200)
            self.send_header("Content-Length", str(len(ROWS)))
            self.end_headers()
            self.wfile.write(ROWS[:-10])
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl", "other.jsonl"):
        (folder / name).write_bytes(ROWS)
    monkeypatch.setattr(fetch, "WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(Handler, "fails", {})
    monkeypatch.setattr(Handler, "short", set())
    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def data(source: str, **fields: object) -> DataSpec:
    return load_recipe("tiny_cpu").data.model_copy(update={"source": source, **fields})


def test_a_split_of_a_folder_and_a_file_arrive_whole(server: str, tmp_path: Path) -> None:
    digest = hashlib.sha256(ROWS).hexdigest()
    for number, (source, split) in enumerate(
        ((server, "train"), (f"{server}/", "test"), (f"{server}/other.jsonl", "train"))
    ):
        found = download_data(data(source, split=split, digest=digest), tmp_path / str(number))
        assert (found.digest, found.source) == (digest, source)
        assert (tmp_path / str(number) / f"{split}.jsonl").read_bytes() == ROWS


def test_a_server_that_fails_is_asked_again(server: str, tmp_path: Path) -> None:
    Handler.fails["train.jsonl"] = 2
    download_data(data(server), tmp_path / "data")
    Handler.fails["train.jsonl"] = 3
    with pytest.raises(ArtifactError, match="503"):
        download_data(data(server), tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("wrong", ["missing", "short", "other content", "nobody there"])
def test_what_does_not_arrive_whole_leaves_nothing_behind(
    wrong: str, server: str, tmp_path: Path
) -> None:
    source, digest = server, None
    if wrong == "missing":
        source = f"{server}/nowhere"
    elif wrong == "short":
        Handler.short = {"train.jsonl"}
    elif wrong == "other content":
        digest = "0" * 64
    else:
        source = "http://127.0.0.1:1"
    with pytest.raises(ArtifactError, match=r"could not be downloaded|data\.digest is 0000"):
        download_data(data(source, digest=digest), tmp_path / "data")
    assert not list(tmp_path.glob("*.partial"))
    if wrong != "other content":
        assert not (tmp_path / "data").exists()


def test_offline_nothing_is_asked(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ArtifactError, match="Offline"):
        download_data(data(server), tmp_path / "data")
