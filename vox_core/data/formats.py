"""Data files by their names: what they hold, and which are to train and which to validate on.

The name decides and not the content: a file is read in one way only, today and tomorrow. A suffix
or scheme that the core does not read belongs to the plugin that provides it (point `row-sources`);
a suffix that nobody provides is JSONL.

A file is trained on. A folder stands for its `train.jsonl` (or `train.csv`,
`train-00000-of-00002.parquet` and so on) and, where there is one, its `valid.jsonl`; one without a
`train` file for all data files in it that are not named after another side. Text files count where
there is nothing else: beside rows they are notes and licences.

Rows from stdin or Python are kept as a file in the cache, because they are read more than once, and
by a resumed run again. Nothing removes it but its owner.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from vox_core import files
from vox_core.cache import cache_folder, cache_root
from vox_core.errors import DataError
from vox_core.host.discover import discover
from vox_core.host.load import names_at

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
    """Format and compression of a file, and the name that a plugin provides (`.parquet`, `hf:`)."""

    kind: Kind
    compression: Compression
    name: str = ""


def format_of(path: Path) -> Format:
    """Return the format of a file by its suffix or scheme; JSONL if unknown."""
    if scheme := _scheme(path):
        return Format("plugin", "", scheme)
    suffix, compression = _suffixes(path)
    if not suffix or suffix in _KINDS or suffix not in _provided():
        return Format(_KINDS.get(suffix, "jsonl"), compression)
    return Format("plugin", compression, suffix)


def is_known(path: Path) -> bool:
    """Whether the name says what the file is."""
    return (suffix := _suffixes(path)[0]) in _KINDS or (bool(suffix) and suffix in _provided())


def stem_of(path: Path) -> str:
    """The name without what says its format: `train` of `train.csv.gz`."""
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path).stem


def is_remote(path: Path) -> bool:
    """Whether a plugin's scheme is meant and no file: `hf:owner/name`."""
    return bool(_scheme(path))


def place_of(path: Path, number: int = 0) -> str:
    """Format a row's place for messages: a line of JSONL, or a row; 0 is the whole file."""
    given = path.parent == cache_root() / GIVEN
    name = "the given rows" if given else str(path)
    lines = format_of(path).kind == "jsonl" and not given
    return f"{name}, {'line' if lines else 'row'} {number}" if number else name


def _suffixes(path: Path) -> tuple[str, Compression]:
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    return (path.with_suffix("") if compression else path).suffix.lower(), compression


def _scheme(path: Path) -> str:
    head, colon, _ = str(path).partition(":")
    return f"{head}:" if colon and "/" not in head and f"{head}:" in _provided() else ""


@cache
def _provided() -> frozenset[str]:
    """Suffixes and schemes of installed plugins and of the catalog's."""
    return frozenset(names_at(POINT, discover()))


TRAIN_NAME = "train.jsonl"
VALID_NAME = "valid.jsonl"
_TRAIN = ("train",)
_VALID = ("valid", "validation")
_OTHER = ("test", "dev", "eval")
GIVEN = "given"
"""Folder of the cache for rows that came from stdin or Python."""


def find_split(paths: Sequence[Path], valid: Path | None = None) -> tuple[list[Path], list[Path]]:
    """The files to train on and those to validate on.

    Args:
        paths: files, folders, and data sets of the hub, which stay what they are.
        valid: in place of every folder's own validation file.

    Raises:
        DataError: D001, a folder has no data, or a file is not there; D013, a folder has several
            files of one side, each of which could be all of it.
    """
    train = [file for path in paths for file in _of(path)]
    found = [file for path in paths if path.is_dir() for file in _side(path, _VALID)]
    validation = [valid] if valid else found
    require_files([path for path in (*train, *validation) if not is_remote(path)])
    return train, validation


def _of(path: Path) -> list[Path]:
    """The files to train on that `path` stands for."""
    if is_remote(path) or not path.is_dir():
        return [path]
    if train := _side(path, _TRAIN):
        return train
    rest = [file for file in _files(path) if not _is_of(file, (*_VALID, *_OTHER))]
    rows = [file for file in rest if format_of(file).kind != "text"]
    return rows or rest or [path / TRAIN_NAME]


def _files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and is_known(file) and not file.name.startswith(".")
    )


def _side(folder: Path, names: Sequence[str]) -> list[Path]:
    """The file of that name, or those that are numbered parts of it."""
    plain = folder / f"{names[0]}.jsonl"
    if plain.is_file():
        return [plain]
    found = [file for file in _files(folder) if _is_of(file, names)]
    whole = [file for file in found if stem_of(file) in names]
    if len(whole) > 1 or (whole and len(found) > 1):
        raise DataError(
            "D013",
            "a folder has several files that could be its data",
            where=folder,
            found=", ".join(file.name for file in found),
            expected=f"one {names[0]} file, or parts named {names[0]}-00000, {names[0]}-00001, …",
            remedy="name the files themselves with --data and --valid",
        )
    return found


def _is_of(file: Path, names: Sequence[str]) -> bool:
    """`train.csv`, or a part of it such as `train-00000-of-00002.parquet`."""
    stem = stem_of(file)
    head, _, rest = stem.partition("-")
    return stem in names or (head in names and rest[:1].isdigit())


def require_files(paths: Sequence[Path]) -> None:
    """Refuse files that are not there (D001)."""
    if missing := [path for path in paths if not path.is_file()]:
        what, remedy, first = "a data file is missing", "correct the path", missing[0]
        if first.parent == cache_root() / GIVEN:
            what = "the copy of rows that came from stdin or Python is gone"
            remedy = "give the same rows again: ... | vox train --resume RUN -, or data=rows"
        elif shares := [each for each in missing if re.fullmatch(r"0?\.\d+", str(each))]:
            remedy = f"name a file, or for a share of the rows use --valid-share {shares[0]}"
        raise DataError(
            "D001",
            what,
            where=", ".join(map(str, missing)),
            found="a folder" if first.is_dir() else "a pipe" if first.exists() else "nothing there",
            expected=f"a file, - for a pipe, or a folder with {TRAIN_NAME} and maybe {VALID_NAME}",
            remedy=remedy,
        )


def keep_rows(lines: Iterable[bytes], origin: str) -> Path:
    """Write JSONL to the cache, as a file named after its bytes.

    Args:
        origin: for an error.

    Raises:
        DataError: D002, nothing comes.
        OutputError: the cache cannot be written.
        StorageError: the disk is full, or an I/O error.
    """
    folder, sha256 = cache_folder(GIVEN), hashlib.sha256()
    temporary = files.temporary_beside(folder / TRAIN_NAME)
    try:
        with files.new_file(temporary) as file:
            for data in lines:
                file.write(data)
                sha256.update(data)
            size = file.tell()
        if not size:
            what, remedy = "a data file is empty", "give rows, as in: cat train.jsonl | vox train -"
            raise DataError("D002", what, where=origin, found="nothing", remedy=remedy)
        kept = folder / f"{sha256.hexdigest()[:16]}.jsonl"
        if not kept.is_file() or kept.stat().st_size != size:  # another process may be reading it
            with files.storage_errors(kept):
                files.calls.rename(temporary, kept)
        return kept
    finally:
        files.remove(temporary)


def lines_of(rows: Iterable[object]) -> Iterator[bytes]:
    """Yield each row as a line of JSONL (D003 if one is no object of JSON)."""
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"{type(row).__name__}, which is no row")
            yield json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            what, where = "rows have to be dictionaries of JSON values", f"row {number}"
            remedy = "of a DatasetDict give one split, of a DataFrame to_dict('records')"
            raise DataError("D003", what, where=where, found=error, remedy=remedy) from error
