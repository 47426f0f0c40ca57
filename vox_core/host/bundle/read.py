"""A bundle file read by someone who trusts nothing in it.

Every member is held against the lock, and nothing is unpacked but wheels that the lock vouches for.
What the catalog says about them is held against it in verify.py.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from packaging.pylock import Package, Pylock, PylockValidationError
from pydantic import TypeAdapter, ValidationError

from vox_core import files
from vox_core.errors import BackendError
from vox_core.host.bundle.archive import ABOUT, LOCK, WHEELS, About, Wheel
from vox_core.host.bundle.members import Unreadable, member, text

_WHEEL_MEMBER = re.compile(rf"{WHEELS}[A-Za-z0-9._+!-]+\.whl")


@dataclass(frozen=True, slots=True)
class Contents:
    """What an archive says of itself; `sound` are the wheels that are what the lock says."""

    about: About | None
    wheels: tuple[Wheel, ...]
    sound: tuple[Wheel, ...]
    faults: tuple[str, ...]


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive at `path`.

    Raises:
        BackendError: B008, it is no zip archive; B012, there is no such file to read.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise _missing(path, error) from error
    with file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise invalid(path, [f"not a zip archive: {error}"]) from error
        with archive:
            yield archive


def invalid(path: Path, faults: Sequence[str]) -> BackendError:
    """The error that lists what is wrong with a bundle."""
    return BackendError(
        "B008",
        "the bundle is not what its lock and the catalog say",
        where=path,
        faults=faults,
        remedy="do not use it; get it again from where it was made, or make a new one: "
        "vox bundle build",
    )


def inspect(archive: zipfile.ZipFile) -> Contents:
    """Hold every member against the lock."""
    faults = _member_faults(archive.infolist())
    about = _about(archive, faults)
    wheels = _locked(archive, faults)
    members = {info.orig_filename: info for info in archive.infolist()}
    sound = [wheel for wheel in wheels if _is_sound(archive, members, wheel, faults)]
    unlocked = {name for name in members if _WHEEL_MEMBER.fullmatch(name)}
    unlocked -= {wheel.member for wheel in wheels}
    faults += [f"{name}: not in the lock" for name in sorted(unlocked)]
    return Contents(about, tuple(wheels), tuple(sound), tuple(faults))


def unpack(archive: zipfile.ZipFile, wheel: Wheel, folder: Path) -> None:
    """Write a sound wheel into `folder`.

    Raises:
        Unreadable: it is not what it was.
        StorageError: it cannot be written.
    """
    path = folder / wheel.file
    with (
        member(archive, wheel.member) as content,
        files.storage_errors(path),
        path.open("xb") as out,
    ):
        shutil.copyfileobj(content, out)


def _missing(path: Path, error: OSError) -> BackendError:
    return BackendError(
        "B012",
        "the bundle file cannot be opened",
        where=path,
        found=error.strerror or error,
        expected="a file that `vox bundle build` has made",
        remedy="correct the path, or make the file: vox bundle build ID --out FILE",
    )


def _member_faults(infos: Sequence[zipfile.ZipInfo]) -> list[str]:
    faults = []
    # Names that differ in case alone are one file on some disks.
    counted = Counter(info.orig_filename.lower() for info in infos)
    faults += [f"{name}: stands {count} times" for name, count in counted.items() if count > 1]
    for info in infos:
        name = info.orig_filename
        if _leaves_the_archive(name):
            faults.append(f"{name}: leads out of the archive")
        elif name not in (ABOUT, LOCK) and not _WHEEL_MEMBER.fullmatch(name):
            faults.append(f"{name}: does not belong in a bundle")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            faults.append(f"{name}: compressed or encrypted; members are stored as they are")
    return faults


def _leaves_the_archive(name: str) -> bool:
    parts = re.split(r"[/\\]", name)
    return ".." in parts or parts[0] == "" or parts[0].endswith(":")


def _about(archive: zipfile.ZipFile, faults: list[str]) -> About | None:
    if (document := _document(archive, ABOUT, faults)) is None:
        return None
    try:
        return TypeAdapter(About).validate_python(document)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(map(str, detail["loc"]))
            faults.append(f"{ABOUT}: {key}: {detail['msg'].lower()}")
    return None


def _locked(archive: zipfile.ZipFile, faults: list[str]) -> list[Wheel]:
    """The wheels of the lock that it describes in full."""
    if (document := _document(archive, LOCK, faults)) is None:
        return []
    try:
        lock = Pylock.from_dict(document)
    except PylockValidationError as error:
        faults.append(f"{LOCK}: {error}")
        return []
    wheels = []
    for package in lock.packages:
        if isinstance(wheel := _wheel_of(package), Wheel):
            wheels.append(wheel)
        else:
            faults.append(f"{LOCK}: {package.name}: {wheel}")
    counted = Counter(wheel.name for wheel in wheels)
    faults += [f"{LOCK}: {name}: locked twice" for name, count in counted.items() if count > 1]
    return wheels


def _wheel_of(package: Package) -> Wheel | str:
    """The one wheel of a package, or why it cannot be taken."""
    if len(package.wheels or ()) != 1 or package.version is None:
        return "expected a version and one wheel"
    (wheel,) = package.wheels or ()
    path, sha256 = wheel.path or "", wheel.hashes.get("sha256")
    if not _WHEEL_MEMBER.fullmatch(path) or wheel.size is None or sha256 is None:
        return f"expected the path of a wheel under {WHEELS}, its size and its sha256"
    # packaging has held the file's name against the package's name and version.
    return Wheel(package.name, str(package.version), path.removeprefix(WHEELS), sha256, wheel.size)


def _document(archive: zipfile.ZipFile, name: str, faults: list[str]) -> dict[str, Any] | None:
    if name not in archive.NameToInfo:
        faults.append(f"{name}: missing")
        return None
    try:
        return tomllib.loads(text(archive, name))
    except (Unreadable, ValueError, RecursionError) as error:
        faults.append(f"{name}: cannot be read: {error}")
    return None


def _is_sound(
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    wheel: Wheel,
    faults: list[str],
) -> bool:
    if (info := members.get(wheel.member)) is None:
        faults.append(f"{wheel.member}: missing")
    elif info.file_size != wheel.size:  # before reading: a size can be a lie of any length
        faults.append(f"{wheel.member}: {info.file_size} bytes, the lock has {wheel.size}")
    elif info.compress_type != zipfile.ZIP_STORED:
        pass  # told already; what it unpacks to may have no end
    elif (found := _digest(archive, info)) != wheel.sha256:
        faults.append(f"{wheel.member}: SHA-256 {found}, the lock has {wheel.sha256}")
    else:
        return True
    return False


def _digest(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    try:
        with member(archive, info.filename) as content:
            return _sha256(content)
    except Unreadable as error:
        return f"cannot be had ({error})"


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
