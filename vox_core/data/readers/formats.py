"""What a data file is, by its name.

The name decides and not the content: a file is read in one way only, today and tomorrow. What a
name says wrongly is told with the fault of the first row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["jsonl", "json", "csv", "tsv", "text", "parquet", "hub"]
Compression: TypeAlias = Literal["", "gzip", "zstd"]

HUB = "hf:"
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".parquet": "parquet",
}


class Format(NamedTuple):
    """What a file holds, and how it is compressed."""

    kind: Kind
    compression: Compression


def format_of(path: Path) -> Format:
    """What a file is; one of no known suffix is JSONL."""
    if is_hub(path):
        return Format("hub", "")
    stem, compression = path, _COMPRESSIONS.get(path.suffix.lower(), "")
    if compression:
        stem = path.with_suffix("")
    return Format(_KINDS.get(stem.suffix.lower(), "jsonl"), compression)


def is_known(path: Path) -> bool:
    """Whether the name says what the file is."""
    stem = path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path
    return stem.suffix.lower() in _KINDS


def stem_of(path: Path) -> str:
    """The name without what says its format: `train` of `train.csv.gz`."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path
    return name.stem


def is_hub(path: Path) -> bool:
    """Whether a data set of the hub is meant: `hf:owner/name`."""
    return str(path).startswith(HUB)


def is_plain(path: Path) -> bool:
    """Whether the file is read as it is."""
    return format_of(path) == ("jsonl", "")


def place_of(path: Path, number: int) -> str:
    """Where a row stands, for messages: a line of JSONL, or a row; 0 is the whole file."""
    if not number:
        return str(path)
    return f"{path}, {'line' if format_of(path).kind == 'jsonl' else 'row'} {number}"
