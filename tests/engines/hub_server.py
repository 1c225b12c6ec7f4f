"""A local server that speaks the part of the hub's API that a download uses.

It can break a connection once, miss a file, send other bytes than it states, move a branch, and ask
for a token which a refusal repeats, as a careless server might.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

REPOSITORY = "org/name"


def commit_name(label: str) -> str:
    """A commit: 40 hexadecimal digits."""
    return hashlib.sha1(label.encode()).hexdigest()


@dataclass(kw_only=True)
class Hub:
    """One repository: commits, branches, faults, and what was asked for."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Asked for where set."""
    cut_once: dict[str, int] = field(default_factory=dict)
    """File -> bytes after which the connection breaks, one time."""
    missing: set[str] = field(default_factory=set)
    """Files that are listed and answered with 404."""
    altered: set[str] = field(default_factory=set)
    """Files that are sent with one bit changed."""
    forbidden: set[str] = field(default_factory=set)
    """Commits whose large files are refused, in a message that repeats the token."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header)."""
    endpoint: str = ""

    def publish(self, folder: Path, label: str, *, branch: str = "main") -> str:
        """Commit the files of a folder and let the branch stand for it."""
        commit = commit_name(label)
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def fetched(self, name: str) -> list[str | None]:
        """Range header of each GET of a file."""
        return [
            range_
            for method, path, range_ in self.requests
            if method == "GET" and path.endswith(f"/{name}")
        ]


def is_large(name: str) -> bool:
    """Whether the file is stored apart from Git and named by its SHA-256."""
    return name.endswith(".safetensors")


def stated_hash(name: str, content: bytes) -> str:
    """The hash that the hub states for a file."""
    if is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.token is not None:
            given = self.headers.get("Authorization")
            if given != f"Bearer {self.hub.token}":
                return self._refuse(401, f"Invalid credentials in Authorization: {given}")
        prefix = f"/api/models/{REPOSITORY}"
        if path.startswith(f"{prefix}/revision/"):
            return self._revision(path.removeprefix(f"{prefix}/revision/"))
        if path.startswith(f"{prefix}/tree/"):
            return self._tree(path.removeprefix(f"{prefix}/tree/"))
        if path.startswith(f"/{REPOSITORY}/resolve/"):
            revision, _, name = path.removeprefix(f"/{REPOSITORY}/resolve/").partition("/")
            return self._file(revision, name)
        return self._refuse(404, "no such page", "RepoNotFound")

    def _revision(self, revision: str) -> None:
        commit = self.hub.branches.get(revision, revision)
        if commit not in self.hub.commits:
            return self._refuse(404, "no such revision", "RevisionNotFound")
        siblings = [{"rfilename": name} for name in self.hub.commits[commit]]
        return self._json({"id": REPOSITORY, "sha": commit, "siblings": siblings})

    def _tree(self, commit: str) -> None:
        entries = []
        for name, content in self.hub.commits[commit].items():
            hash_ = stated_hash(name, content)
            entry = {"type": "file", "path": name, "size": len(content), "oid": hash_[:40]}
            if is_large(name):
                entry["lfs"] = {"oid": hash_, "size": len(content), "pointerSize": 100}
            entries.append(entry)
        return self._json(entries)

    def _file(self, revision: str, name: str) -> None:
        commit = self.hub.branches.get(revision, revision)
        content = self.hub.commits.get(commit, {}).get(name)
        if content is None or name in self.hub.missing:
            return self._refuse(404, "no such file", "EntryNotFound")
        if self.command == "GET" and commit in self.hub.forbidden and is_large(name):
            given = self.headers.get("Authorization")
            return self._refuse(403, f"{given} may not read {name}")
        stated = stated_hash(name, content)
        if name in self.hub.altered:
            content = bytes([content[0] ^ 1]) + content[1:]
        start = 0
        wanted = self.headers.get("Range")
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        body = content[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{stated}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if is_large(name):
            self.send_header("X-Linked-Etag", f'"{stated}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_once.pop(name, None)
        self.wfile.write(body[:cut])
        self.wfile.flush()
        if cut is not None:
            self.close_connection = True
            self.connection.shutdown(2)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Error-Message", message)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on a free local port; `hub.endpoint` is its address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
