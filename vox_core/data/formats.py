"""What a data file or reference is, by its name.

The name decides and not the content: a file is read in one way only, today and tomorrow. A suffix
or scheme that the core does not read belongs to the plugin that provides it (point `row-sources`);
a suffix that nobody provides is JSONL.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from vox_core.host.discover import discover
from vox_core.known import known_plugins

Kind: TypeAlias = Literal["jsonl", "json", "csv", "tsv", "text", "plugin"]
Compression: TypeAlias = Literal["", "gzip", "zstd"]

POINT = "row-sources"
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
}


class Format(NamedTuple):
    """What a file holds, how it is compressed, and the name that a plugin provides (`.parquet`,
    `hf:`)."""

    kind: Kind
    compression: Compression
    name: str = ""


def format_of(path: Path) -> Format:
    """What a file is; one of an unknown suffix is JSONL."""
    if scheme := _scheme(path):
        return Format("plugin", "", scheme)
    suffix, compression = _suffixes(path)
    if not suffix or suffix in _KINDS or suffix not in _provided():
        return Format(_KINDS.get(suffix, "jsonl"), compression)
    return Format("plugin", compression, suffix)


def is_known(path: Path) -> bool:
    """Whether the name says what the file is."""
    suffix, _ = _suffixes(path)
    return suffix in _KINDS or (bool(suffix) and suffix in _provided())


def stem_of(path: Path) -> str:
    """The name without what says its format: `train` of `train.csv.gz`."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path
    return name.stem


def is_remote(path: Path) -> bool:
    """Whether a plugin's scheme is meant and no file: `hf:owner/name`."""
    return bool(_scheme(path))


def is_plain(path: Path) -> bool:
    """Whether the file is read as it is."""
    return format_of(path) == ("jsonl", "", "")


def place_of(path: Path, number: int) -> str:
    """Where a row stands, for messages: a line of JSONL, or a row; 0 is the whole file."""
    if not number:
        return str(path)
    return f"{path}, {'line' if format_of(path).kind == 'jsonl' else 'row'} {number}"


def _suffixes(path: Path) -> tuple[str, Compression]:
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    return (path.with_suffix("") if compression else path).suffix.lower(), compression


def _scheme(path: Path) -> str:
    head, colon, _ = str(path).partition(":")
    return f"{head}:" if colon and "/" not in head and f"{head}:" in _provided() else ""


@cache
def _provided() -> frozenset[str]:
    """Suffixes and schemes of installed plugins and of the catalog's."""
    names = {name for entry in known_plugins().values() for name in entry.provides.get(POINT, ())}
    for found in discover():
        names.update(found.manifest.provided.get(POINT, ()) if found.manifest else ())
    return frozenset(names)
