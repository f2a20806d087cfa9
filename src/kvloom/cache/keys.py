"""Keys of cached spans: a SHA-256 chain over token ids, rooted in a namespace and a tenant's salt.

``root = SHA-256(namespace ‖ salt)``, ``key_i = SHA-256(key_{i-1} ‖ token ids as little-endian uint32
‖ extra)``. The namespace digests all that a span's bytes depend on besides its tokens, so equal
keys mean equal bytes, in any process and after any restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

FORMAT_VERSION = 1


def namespace_digest(parts: Mapping[str, Any]) -> bytes:
    """SHA-256 of the canonical JSON of what the cached bytes depend on (weights, dtype, pipeline …)."""
    text = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def root_key(namespace: bytes, salt: bytes) -> bytes:
    """The key before the first block. Lengths are hashed too, so no two pairs collide."""
    return hashlib.sha256(len(namespace).to_bytes(8, "little") + namespace + salt).digest()


def next_key(parent: bytes, token_ids: np.ndarray, extra: bytes = b"") -> bytes:
    """The key of the block that holds ``token_ids`` after ``parent``."""
    return hashlib.sha256(parent + np.ascontiguousarray(token_ids, dtype="<u4").tobytes() + extra).digest()
