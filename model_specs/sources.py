"""Where a model comes from: `generated:tiny`, a folder, or `hf://org/name@revision`; and data.

All access to the hub goes through `from_hub`: huggingface_hub honours HF_ENDPOINT, HF_TOKEN,
HF_HOME and HF_HUB_OFFLINE, and no error of ours repeats a credential, whatever a server or a
library put into its message.

Usage::

    hub = parse_hub("hf://org/name@main")            # HubSource, or None for another source
    path, config = read_config("hf://org/name@main") # path names the commit that `main` stands for
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model_specs.errors import ArtifactError, SpecError
from model_specs.json_text import read_json

T = TypeVar("T")

HUB_PREFIX = "hf://"
GENERATED_PREFIX = "generated:"
DEFAULT_REVISION = "main"

GSM8K_SOURCE = (
    "https://raw.githubusercontent.com/openai/grade-school-math/"
    "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
)
"""Of the authors of GSM8K (Cobbe et al., 2021), MIT: `train.jsonl` and `test.jsonl` at a commit."""

_HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9_]{8,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;)]+")
_USER_IN_URL = re.compile(r"(?<=//)[^/\s@]+@")
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository of the hub at a revision."""

    repository: str
    """`org/name`."""
    revision: str
    """Branch, tag or commit."""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which cannot move."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> str:
        """Return the source that names `commit` instead."""
        return f"{HUB_PREFIX}{self.repository}@{commit}"


def parse_hub(source: str) -> HubSource | None:
    """Return the hub source that `source` names; None when it names none.

    Raises:
        SpecError: It starts with `hf://` and is not of the form hf://org/name@revision.
    """
    if not source.startswith(HUB_PREFIX):
        return None
    match = _HUB.fullmatch(source)
    if match is None:
        raise SpecError(
            f"{redacted(source)!r} is not of the form hf://org/name@revision (a branch, a tag or a "
            "commit)"
        )
    return HubSource(repository=match["repo"], revision=match["revision"] or DEFAULT_REVISION)


def is_url(source: str) -> bool:
    """Whether a source is a file, or a folder of files, on a web server."""
    return source.startswith(("https://", "http://"))


def read_config(source: str) -> tuple[str, dict[str, Any]]:
    """Return (source, parsed config.json) of a model folder or of a repository of the hub.

    The returned source is absolute, and names a commit where the given one names a branch or a tag:
    both legs of a run and each resume then read the same model, whatever the branch does.

    Raises:
        SpecError: The source is of no known form, or is no folder.
        ArtifactError: There is no config.json, it is no JSON object, or the hub cannot be reached.
    """
    hub = parse_hub(source)
    if hub is None:
        folder = Path(source).expanduser().resolve()
        if not folder.is_dir():
            raise SpecError(
                f"model.path={source!r} is no folder ({folder}); name a folder, "
                "hf://org/name@revision or generated:tiny"
            )
        return str(folder), _read_object(folder / "config.json", source)

    def fetch() -> Path:
        import huggingface_hub

        return Path(
            huggingface_hub.hf_hub_download(hub.repository, "config.json", revision=hub.revision)
        )

    file = from_hub(source, fetch)
    return hub.at(file.parent.name), _read_object(file, source)


def from_hub(source: str, fetch: Callable[[], T]) -> T:
    """Return `fetch()`; any failure becomes an `ArtifactError` that holds no credential."""
    from huggingface_hub import constants

    try:
        return fetch()
    except Exception as error:  # the client raises its HTTP library's own classes too
        offline = " (offline: HF_HUB_OFFLINE is set)" if constants.is_offline_mode() else ""
        text = redacted(f"{type(error).__name__}: {error}")
        message = (
            f"{source} could not be downloaded from {redacted(constants.ENDPOINT)}{offline}: "
            f"{text}; check the name, the network and HF_TOKEN, or name a local folder by "
            "`--set model.path=FOLDER`"
        )
    # Outside of the handler, so that no traceback shows the library's own message.
    raise ArtifactError(message)


def redacted(text: str) -> str:
    """Return `text` with every credential replaced by `***`.

    Covered are the tokens in use, whatever looks like a token of the hub, the value of an
    Authorization header, and a user and password in a URL.
    """
    secrets = [os.environ.get(name) for name in _TOKEN_VARIABLES]
    secrets.append(_stored_token())
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    text = _BEARER.sub(r"\1 ***", _TOKEN.sub("***", text))
    return _USER_IN_URL.sub("***@", text)


def _stored_token() -> str | None:
    import huggingface_hub

    token = huggingface_hub.get_token()
    return token if isinstance(token, str) else None


def _read_object(file: Path, source: str) -> dict[str, Any]:
    try:
        return read_json(file)
    except ArtifactError as error:
        raise ArtifactError(f"{source}: {error}") from error
