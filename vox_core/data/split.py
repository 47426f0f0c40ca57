"""Which files hold training and which validation data.

A file is trained on. A folder stands for its `train.jsonl` (or `train.csv`,
`train-00000-of-00002.parquet` and so on) and, where there is one, its `valid.jsonl`; one without a
`train` file for all data files in it that are not named after another side. Text files count where
there is nothing else: beside rows they are notes and licences.

Rows from stdin are kept as a file in the cache, because they are read more than once, and by a
resumed run again. Nothing removes it but its owner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from vox_core import disk, files
from vox_core.cache import cache_folder, cache_root
from vox_core.data.formats import format_of, is_known, is_remote, stem_of
from vox_core.errors import DataError

TRAIN_NAME = "train.jsonl"
VALID_NAME = "valid.jsonl"
_TRAIN = ("train",)
_VALID = ("valid", "validation")
_OTHER = ("test", "dev", "eval")
STDIN = "stdin"
"""Folder of the cache for rows that came from stdin."""


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
    sides = (*_VALID, *_OTHER)
    rest = [file for file in _files(path) if not _is_of(file, sides)]
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
    """Raises:
    DataError: D001, one of them is not there.
    """
    if missing := [path for path in paths if not path.is_file()]:
        what, remedy = "a data file is missing", "correct the path given with --data or --valid"
        if missing[0].parent == cache_root() / STDIN:
            what = "the copy of rows that came from stdin is gone"
            remedy = "pipe the same rows in again: ... | vox train --resume RUN -"
        raise DataError(
            "D001",
            what,
            where=", ".join(map(str, missing)),
            found="a folder" if missing[0].is_dir() else "nothing there",
            expected=f"a data file, or a folder with {TRAIN_NAME} and, if wanted, {VALID_NAME}",
            remedy=remedy,
        )


def keep_stdin(stream: IO[bytes]) -> Path:
    """Copy JSONL from a pipe into the cache, as a file named after its bytes.

    Raises:
        DataError: D002, nothing comes.
        OutputError: the cache cannot be written.
        StorageError: the disk is full, or an I/O error.
    """
    folder, sha256 = cache_folder(STDIN), hashlib.sha256()
    temporary = files.temporary_beside(folder / TRAIN_NAME)
    try:
        with files.new_file(temporary) as file:
            while data := stream.read(1 << 20):
                file.write(data)
                sha256.update(data)
            size = file.tell()
        if not size:
            raise DataError(
                "D002",
                "a data file is empty",
                where="stdin",
                found="nothing",
                expected="rows of JSONL",
                remedy="pipe rows into the command: cat train.jsonl | vox train -",
            )
        kept = folder / f"{sha256.hexdigest()[:16]}.jsonl"
        with files.storage_errors(kept):
            disk.calls.rename(temporary, kept)
        return kept
    finally:
        files.remove(temporary)
