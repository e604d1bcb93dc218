"""Idempotency keys: logs have a hash of each, for thirty days of elapsed time (`Clock`), and of the newest 65,536 at most."""

from __future__ import annotations

import hashlib
from typing import Literal

KeyStatus = Literal["stored", "not stored", "not yet"]
KEYS_KEPT = 1 << 16
KEYS_KEPT_MS = 30 * 86_400_000


def key_hash(key: str) -> bytes:
    """``key``: also a name of a file, which may have bytes that are not UTF-8."""
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=16).digest()


def prune(keys: dict[bytes, tuple[int, int]], now: int) -> list[int]:
    """Forget keys past their retention; returns the values of those. ``keys``: (elapsed time, value) of each, oldest first."""
    excess, values = len(keys) - KEYS_KEPT, []
    for number, (key, (time, value)) in enumerate(list(keys.items())):
        if number >= excess and time > now - KEYS_KEPT_MS:
            break
        del keys[key]
        values.append(value)
    return values
