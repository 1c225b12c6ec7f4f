"""Fetches one file from a web server, whole or not at all; its content is the caller's to check.

Usage::

    fetch("https://example.org/data/train.jsonl", folder / "train.jsonl")
"""

from __future__ import annotations

import time
from pathlib import Path

from model_specs.errors import ArtifactError
from model_specs.sources import redacted

WAITS_S = (1.0, 4.0)
"""Before the second and the third attempt."""
TIMEOUT_S = 60.0
"""Without an answer, and between two parts of one."""


def fetch(url: str, target: Path) -> None:
    """Write what `url` answers to `target`; tried three times.

    The client is huggingface_hub's: it knows proxies and certificates, sends no token to another
    host, and makes no request where HF_HUB_OFFLINE is set.

    Raises:
        ArtifactError: The server cannot be reached, does not have the file, or ends too early.
    """
    from huggingface_hub import get_session

    said = ""
    for wait_s in (0.0, *WAITS_S):
        time.sleep(wait_s)
        try:
            with get_session().stream("GET", url, timeout=TIMEOUT_S) as response:
                response.raise_for_status()
                with target.open("wb") as file:
                    for part in response.iter_bytes():
                        file.write(part)
        except Exception as error:  # of the HTTP library that the client has, whichever it is
            target.unlink(missing_ok=True)
            said = redacted(f"{type(error).__name__}: {error}")
        else:
            return
    # Outside of the handler, so that no traceback shows the library's own message.
    raise ArtifactError(
        f"{redacted(url)} could not be downloaded: {said}; check the address and the network, or "
        "name a folder or a .jsonl or .parquet file by `--set data.source=PATH`"
    )
