"""Every random draw's seed is a hash of what it is for, never of call order, rank or replica."""

from __future__ import annotations

import hashlib


def derive_seed(root: int, *labels: str | int) -> int:
    """Return a seed in [0, 2**63) from the run's root seed and what the draw is for.

    Labels are length-prefixed and typed, so that ("ab", "c") and ("a", "bc"), or 1 and "1", differ.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"lockstep-seed")
    for label in (root, *labels):
        encoded = f"{'i' if isinstance(label, int) else 's'}{label}".encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little") >> 1
