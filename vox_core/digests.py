"""SHA-256 digests of a model's weights, tokenizer and configuration.

A digest is SHA-256, in hex. The digest of a set of files covers their names and contents,
not their location or time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from vox_core import bounded_json
from vox_core.cache import file_sha256
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
