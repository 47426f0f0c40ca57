"""SHA-256 of files, and of a model's weights, tokenizer and configuration.

A digest is SHA-256, in hex. The digest of a set of files covers their names and contents, not their
location or time. The hash of a large file is cached under its real path, size and times. A file
changed in place has other times and is hashed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vox_core import bounded_json, files
from vox_core.cache import cache_root
from vox_core.errors import OutputError, StorageError
from vox_core.weights import WeightFolder

CONFIG_FILE = "config.json"
_BY_WHOM = ("_name_or_path", "transformers_version")
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_WORTH_KEEPING = 1 << 20
"""Bytes below which hashing a file is quicker than looking its hash up."""


def folder_digest(folder: Path) -> str:
    """Return the digest of the weights of a model folder; errors as for `WeightFolder`."""
    return _digest(folder, WeightFolder(folder).files)


def tokenizer_digest(folder: Path) -> str:
    """Return the digest of the tokenizer's files that the folder has."""
    return _digest(folder, (name for name in TOKENIZER_FILES if (folder / name).is_file()))


def config_digest(folder: Path) -> str:
    """Return the digest of `config.json` as canonical JSON, without the keys that name its
    writer."""
    config = bounded_json.read(folder / CONFIG_FILE)
    said = {key: value for key, value in config.items() if key not in _BY_WHOM}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _digest(folder: Path, names: Iterable[str]) -> str:
    pairs = [[name, file_sha256(folder / name)] for name in sorted(names)]
    return hashlib.sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's content, cached for large files."""
    with files.storage_errors(path):
        status = path.stat()
        if status.st_size < _WORTH_KEEPING:
            return _hash(path)
        real = path.resolve()
    key = {
        "path": str(real),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }
    kept = cache_root() / "digests" / f"{hashlib.sha256(str(real).encode()).hexdigest()}.json"
    with suppress(OSError, ValueError):  # unreadable: hashed again
        match json.loads(kept.read_bytes()):
            case {"sha256": str(sha256), **rest} if rest == key:
                return sha256
    with files.storage_errors(path):
        sha256 = _hash(path)
    with suppress(StorageError, OutputError):  # without a cache entry it is hashed again
        files.make_folder(kept.parent)
        files.write_json(kept, {**key, "sha256": sha256})
    return sha256


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
