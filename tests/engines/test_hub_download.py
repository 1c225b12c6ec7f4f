"""Downloads against a local server that speaks the hub's API, with the user's variables.

Each download runs in a fresh process, because the client reads HF_ENDPOINT, HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE once, when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.tiny_model import write_tiny_model
from model_specs.registry import load_recipe
from model_specs.sources import redacted
from tests.engines.hub_server import Hub, serving, stated_hash

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "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"
MODEL = load_recipe("tiny_cpu").model
WEIGHTS = "model.safetensors"

PROGRAM = """
import json, sys
from engines.checkpoint.download import download_model
from model_specs.errors import LockstepError
from model_specs.model_spec import ModelSpec
try:
    found = download_model(ModelSpec.model_validate_json(sys.argv[1]), sys.argv[2])
except LockstepError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
else:
    print(json.dumps({
        "revision": found.revision,
        "pinned": found.pinned_source,
        "weights_digest": found.weights_digest,
        "tokenizer_digest": found.tokenizer_digest,
        "files": sorted(found.files),
    }))
"""


PREPARE = """
import json, sys
from flows.prepare import prepare
from flows.run_request import Request
ended = []
for branch in ("gated", "main"):
    request = Request(recipe="tiny_cpu", overrides={"model.path": f"hf://org/name@{branch}"})
    state = prepare(request, runs_dir=sys.argv[1], run_id=branch, return_state=True)
    ended.append([state.type.value, state.message])
print(json.dumps(ended))
"""


class User:
    """A user with a cache of the hub's files, whose downloads go to folders of their own."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self.hub = hub
        self.output = ""

    def run(self, program: str, *arguments: str, **variables: str) -> Any:
        """Run a program; returns what its last line of output holds."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_HOME": str(self.folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_VERBOSITY": "debug",
            "HF_HUB_ETAG_TIMEOUT": "5",
            # The command line waits as long for Prefect's server, on a machine that is busy.
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=540,
            check=False,
        )
        self.output += done.stdout + done.stderr
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    def download(
        self, name: str, source: str = "hf://org/name@main", *, spec: Any = None, **variables: str
    ) -> Any:
        """Download to the folder `name`."""
        model = (spec or MODEL).model_copy(update={"path": source})
        return self.run(PROGRAM, model.model_dump_json(), str(self.folder / name), **variables)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "source", MODEL)
    return tmp_path / "source"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving(Hub()) as hub:
        (tmp_path / "user").mkdir()
        yield User(tmp_path / "user", hub)


def test_a_branch_is_recorded_as_the_commit_that_it_stands_for(user: User, source: Path) -> None:
    (source / "notes.bin").write_bytes(b"x")
    commit = user.hub.publish(source, "first")
    found = user.download("a")
    assert (found["revision"], found["pinned"]) == (commit, f"hf://org/name@{commit}")
    assert WEIGHTS in found["files"]
    assert "notes.bin" not in found["files"]
    assert (user.folder / "a" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    manifest = json.loads((user.folder / "a" / "manifest.json").read_text())
    assert (manifest["source"], manifest["revision"]) == ("hf://org/name@main", commit)
    # Under the name of the commit it is the same folder: what a resumed run asks for.
    num_requests = len(user.hub.requests)
    assert user.download("a", found["pinned"])["files"] == found["files"]
    assert len(user.hub.requests) == num_requests


def test_a_broken_connection_is_taken_up_where_it_broke(user: User, source: Path) -> None:
    user.hub.publish(source, "first")
    user.hub.cut_once[WEIGHTS] = 100_000
    model = MODEL.model_copy(update={"path": "hf://org/name@main"})
    # The client goes on at a whole chunk, of 10 MiB; here a smaller one.
    small_chunks = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 50_000\n"
    found = user.run(small_chunks + PROGRAM, model.model_dump_json(), str(user.folder / "a"))
    assert "error" not in found
    assert user.hub.fetched(WEIGHTS) == [None, "bytes=100000-"]
    assert (user.folder / "a" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()


def test_a_missing_file_is_refused_and_what_arrived_is_kept(user: User, source: Path) -> None:
    user.hub.publish(source, "first")
    user.hub.missing.add(WEIGHTS)
    refused = user.download("a")["error"]
    assert refused.startswith("ArtifactError: hf://org/name@main could not be downloaded from http")
    assert "404" in refused
    assert WEIGHTS in refused
    assert not (user.folder / "a").exists()
    arrived = user.hub.fetched("tokenizer.json")
    user.hub.missing.clear()
    assert "error" not in user.download("a")
    assert user.hub.fetched("tokenizer.json") == arrived == [None]


def test_a_repository_without_weights_is_refused(user: User, source: Path) -> None:
    (source / WEIGHTS).unlink()
    user.hub.publish(source, "first")
    assert f"has neither {WEIGHTS} nor" in user.download("a")["error"]
    assert not (user.folder / "a").exists()


@pytest.mark.parametrize("name", [WEIGHTS, "generation_config.json"])
def test_a_file_with_another_checksum_is_refused(user: User, source: Path, name: str) -> None:
    user.hub.publish(source, "first")
    user.hub.altered.add(name)
    refused = user.download("a")["error"]
    stated = stated_hash(name, (source / name).read_bytes())
    assert f"{name} has hash " in refused
    assert f"but the hub states {stated}" in refused
    assert not (user.folder / "a").exists()
    # The message says which file of the cache to delete.
    user.hub.altered.clear()
    Path(refused.partition(": delete ")[2].partition(" and ")[0]).unlink()
    assert "error" not in user.download("a")


def test_a_moved_branch_is_refused_where_the_digests_are_known(user: User, source: Path) -> None:
    first = user.hub.publish(source, "first")
    found = user.download("a")
    known = MODEL.model_copy(
        update={name: found[name] for name in ("weights_digest", "tokenizer_digest")}
    )
    write_tiny_model(source, MODEL, seed=1)
    second = user.hub.publish(source, "second")
    refused = user.download("b", spec=known)["error"]
    assert f"model.weights_digest is {found['weights_digest']} in the spec but" in refused
    assert f"(revision 'main' stands for commit {second} now)" in refused
    assert user.download("c")["revision"] == second  # nothing is known: it is taken and recorded
    pinned = user.download("d", found["pinned"], spec=known)
    assert (pinned["revision"], pinned["weights_digest"]) == (first, found["weights_digest"])


def test_an_unknown_revision_is_refused_by_name(user: User, source: Path) -> None:
    user.hub.publish(source, "first")
    assert "hf://org/name@v9 could not" in user.download("a", "hf://org/name@v9")["error"]


def test_offline_the_cache_is_enough_and_no_request_is_made(user: User, source: Path) -> None:
    commit = user.hub.publish(source, "first")
    refused = user.download("a", HF_HUB_OFFLINE="1")["error"]
    assert "(offline: HF_HUB_OFFLINE is set)" in refused
    assert user.hub.requests == []
    found = user.download("a")
    num_requests = len(user.hub.requests)
    assert user.download("b", HF_HUB_OFFLINE="1") == found
    assert user.download("c", f"hf://org/name@{commit}", HF_HUB_OFFLINE="1")["files"]
    assert len(user.hub.requests) == num_requests


def test_the_config_of_an_own_model_is_read_before_its_weights(user: User, source: Path) -> None:
    write_tiny_model(source, MODEL.model_copy(update={"num_layers": 3}))
    commit = user.hub.publish(source, "first", branch="dev")
    program = """
import json, sys
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
spec = apply_overrides(load_recipe("tiny_cpu"), (sys.argv[1],))
print(json.dumps([spec.model.num_layers, spec.model.path]))
"""
    found = user.run(program, "model.path=hf://org/name@dev")
    assert found == [3, f"hf://org/name@{commit}"]
    assert user.hub.fetched(WEIGHTS) == []


def test_a_token_is_used_and_never_shown(user: User, source: Path) -> None:
    user.hub.publish(source, "first")
    user.hub.token = TOKEN
    wrong = TOKEN[::-1]
    refused = user.download("a", HF_TOKEN=wrong)["error"]
    assert "401" in refused
    assert "***" in refused  # the server repeated the header that it was sent
    anonymous = user.download("a")["error"]
    assert "check the name, the network and HF_TOKEN" in anonymous
    assert "error" not in user.download("a", HF_TOKEN=TOKEN)
    for secret in (TOKEN, wrong):
        assert secret not in user.output
        for file in (user.folder / "a").iterdir():
            assert secret.encode() not in file.read_bytes()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_download_stage_of_a_leg_leaves_the_token_nowhere(
    user: User, source: Path, tmp_path: Path
) -> None:
    user.hub.publish(source, "first")
    gated = user.hub.publish(source, "second", branch="gated")
    user.hub.token = TOKEN
    user.hub.forbidden.add(gated)
    # Ray makes sockets there, whose paths are short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray:
        failed, done = user.run(
            PREPARE,
            str(tmp_path / "runs"),
            HF_TOKEN=TOKEN,
            PREFECT_HOME=str(tmp_path / "prefect"),
            PREFECT_LOGGING_LEVEL="DEBUG",
            PREFECT_LOGGING_EXTRA_LOGGERS="lockstep",
            RAY_TMPDIR=ray,
        )
        assert failed[0] == "FAILED"
        assert "403" in failed[1]
        assert "Bearer *** may not read" in failed[1]  # the server repeated it
        assert done[0] == "COMPLETED", done
        assert (tmp_path / "runs" / "main" / "a" / "model" / WEIGHTS).is_file()
        assert (tmp_path / "runs" / "gated" / "run.json").is_file()
        written = {
            name: files_under(place)
            for name, place in (
                ("runs", tmp_path / "runs"),
                ("prefect", tmp_path / "prefect"),
                ("ray", Path(ray)),
            )
        }
    # The error has reached the logs and Prefect's database.
    assert "may not read" in user.output
    assert any(b"may not read" in content for content in written["prefect"].values())
    assert any(file.name.startswith("worker-") for file in written["ray"])
    assert TOKEN not in user.output
    for found in written.values():
        assert [file for file, content in found.items() if TOKEN.encode() in content] == []


def files_under(folder: Path) -> dict[Path, bytes]:
    """File -> content, of all plain files."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {file: file.read_bytes() for file in files}


def test_credentials_in_an_endpoint_are_not_shown(user: User, source: Path) -> None:
    address = user.hub.endpoint.replace("http://", "http://ann:secret-word@") + "/nowhere"
    refused = user.download("a", HF_ENDPOINT=address)["error"]
    assert "could not be downloaded from http://***@127.0.0.1" in refused
    assert "secret-word" not in refused


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"token {TOKEN}.", "token ***."),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("at https://ann:pw@host/x", "at https://***@host/x"),
        ("HTTP 404 for org/name@main", "HTTP 404 for org/name@main"),
    ],
)
def test_what_looks_like_a_credential_is_replaced(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_the_token_in_use_is_replaced_whatever_it_looks_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "plainword")
    assert redacted("sent plainword to the hub") == "sent *** to the hub"
