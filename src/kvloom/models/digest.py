"""Digests that say whether two models are the same: of weights with configuration, and of the tokenizer.

The prefix cache's namespace holds them, so keys and values computed by other weights are never
found, even under the same directory name. Every byte of the weights is hashed: a sampled digest
would miss a small edit. A large model takes its reading time once; the result is kept in the cache
directory under the file's path, length, times and inode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from kvloom.models.cachedir import read_record, write_record
from kvloom.models.checkpoint import TOKENIZER_FILES, Checkpoint

# Written by tools, without meaning for the model's output.
_IGNORED_SETTINGS = ("_name_or_path", "transformers_version")
_CHUNK_BYTES = 1 << 24


def file_key(path: Path) -> str:
    """Changes when the file is replaced or written to; cheap."""
    status = path.stat()
    parts = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def file_digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 of the file's content, computed once per state of the file."""
    record = cache_dir / "digests" / f"{file_key(path)[:32]}.json"
    known = read_record(record).get("sha256")
    if isinstance(known, str):
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    with contextlib.suppress(OSError):  # an unwritable cache only means hashing again next time
        record.parent.mkdir(parents=True, exist_ok=True)
        write_record(record, {"sha256": digest.hexdigest(), "path": str(path)})
    return digest.hexdigest()


def weights_digest(checkpoint: Checkpoint, cache_dir: Path) -> str:
    """Identifies the weights and the configuration that gives them their meaning."""
    config = {name: value for name, value in checkpoint.config.items() if name not in _IGNORED_SETTINGS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(checkpoint.shards):
        digest.update(f"{path.name}:{file_digest(path, cache_dir)};".encode())
    return digest.hexdigest()


def tokenizer_digest(checkpoint: Checkpoint) -> str:
    """Identifies how text becomes token ids: the tokenizer's files, chat template apart."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = checkpoint.directory / name
        if path.is_file():
            digest.update(f"{name}:{hashlib.sha256(path.read_bytes()).hexdigest()};".encode())
    return digest.hexdigest()
