"""Read a bundle file without trust: every member against its lock, and both against the catalog.

No member is unpacked that the lock does not list. Only stored and deflated members are read (an
LZMA stream names the memory that it wants), of a text at most `LONGEST_TEXT` bytes, and damage of
any kind becomes `Unreadable`. A wheel beside the catalog's own has to be required by one of them,
directly or not.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from packaging.metadata import parse_email
from packaging.pylock import Package, Pylock, PylockValidationError
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vox_bundle.archive import LOCK, WHEELS, Bundle, Wheel, parts_of
from vox_core.api.files import storage_errors
from vox_core.api.installing import FILE_NAME, Catalog, PluginEntry, closure, parse_manifest
from vox_core.errors import BackendError

LONGEST_TEXT = 1 << 22
"""Bytes; the lock of thousands of wheels is far below it, as are manifests and metadata."""
_DAMAGE = (
    zipfile.BadZipFile,
    NotImplementedError,  # a version of the format that Python does not know
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    zlib.error,
)
_ENCRYPTED = 1
_WHEEL_MEMBER = re.compile(rf"{WHEELS}[A-Za-z0-9._+!-]+\.whl")
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")


class Unreadable(Exception):
    """Why a member cannot be read, in words that follow `cannot be read: `."""


def verify(file: Path, catalog: Catalog) -> Bundle:
    """Check every member of a bundle file against its lock, and both against the catalog.

    Raises:
        BackendError: B008, with every fault; B012, there is no such file.
        StorageError: the file cannot be read.
    """
    with _opened(file) as archive:
        faults = _member_faults(archive)
        lock = _lock(archive, faults)
        wheels = [*_wheels(lock.packages, faults)] if lock else []
        faults += _content_faults(archive, wheels)
        if faults or lock is None:
            raise _invalid(file, faults)
        made = (lock.tool or {}).get("vox")
        id, vox = (made.get("bundle"), made.get("vox")) if isinstance(made, dict) else ("", "")
        needs = {wheel.name: _needs(archive, wheel, faults) for wheel in wheels}
        bundle = Bundle(file, str(id), str(vox), tuple(wheels), needs)
        faults += _catalog_faults(archive, bundle, catalog)
    if faults:
        raise _invalid(file, faults)
    return bundle


def unpack(bundle: Bundle, wheels: Iterable[Wheel], folder: Path) -> None:
    """Write wheels of a verified bundle into `folder`; uv checks their hashes once more.

    Raises:
        BackendError: B008, the file has changed.
        StorageError: a wheel cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(bundle.file) as archive:
        for wheel in wheels:
            try:
                with (
                    _member(archive, wheel.member) as content,
                    storage_errors(folder),
                    (folder / wheel.file).open("xb") as out,
                ):
                    shutil.copyfileobj(content, out)
            except Unreadable as error:
                raise _invalid(bundle.file, [f"{wheel.member}: {error}"]) from error


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise BackendError(
            "B012",
            "the bundle file cannot be opened",
            where=path,
            found=error.strerror or error,
            expected="a file that `vox bundle build` has made",
            remedy="correct the path, or make the file: vox bundle build ID --out FILE",
        ) from error
    with file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
            raise _invalid(path, [f"not a zip archive: {error}"]) from error
        with archive:
            yield archive


def _invalid(path: Path, faults: Sequence[str]) -> BackendError:
    return BackendError(
        "B008",
        "the bundle is not what its lock and the catalog say",
        where=path,
        faults=faults,
        remedy="do not use it; get it again from where it was made, or make a new one: "
        "vox bundle build",
    )


# --- the lock -------------------------------------------------------------------------------------


def _member_faults(archive: zipfile.ZipFile) -> list[str]:
    # Names that differ in case alone are one file on some disks.
    counted = Counter(info.orig_filename.lower() for info in archive.infolist())
    faults = [f"{name}: stands {count} times" for name, count in counted.items() if count > 1]
    for info in archive.infolist():
        name = info.orig_filename
        if name != LOCK and not _WHEEL_MEMBER.fullmatch(name):
            faults.append(f"{name}: does not belong in a bundle")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            faults.append(f"{name}: compressed or encrypted; members are stored as they are")
    return faults


def _lock(archive: zipfile.ZipFile, faults: list[str]) -> Pylock | None:
    try:
        return Pylock.from_dict(tomllib.loads(_text(archive, LOCK)))
    except (Unreadable, ValueError, RecursionError, PylockValidationError) as error:
        faults.append(f"{LOCK}: cannot be read: {error}")
    return None


def _wheels(packages: Sequence[Package], faults: list[str]) -> Iterator[Wheel]:
    """Yield the wheels that the lock describes in full."""
    counted = Counter(package.name for package in packages)
    faults += [f"{LOCK}: {name}: locked twice" for name, count in counted.items() if count > 1]
    for package in packages:
        wheel = package.wheels[0] if package.wheels and len(package.wheels) == 1 else None
        path, sha256 = (wheel.path or "", wheel.hashes.get("sha256")) if wheel else ("", None)
        if not (wheel and wheel.size and sha256 and package.version):
            faults.append(f"{LOCK}: {package.name}: expected a version, and one wheel with size")
        elif not _WHEEL_MEMBER.fullmatch(path):
            faults.append(f"{LOCK}: {package.name}: expected the path of a wheel under {WHEELS}")
        else:  # packaging has compared the file's name with the package's name and version
            file = path.removeprefix(WHEELS)
            yield Wheel(package.name, str(package.version), file, sha256, wheel.size)


def _content_faults(archive: zipfile.ZipFile, wheels: Sequence[Wheel]) -> Iterator[str]:
    locked = {wheel.member for wheel in wheels}
    members = {info.orig_filename: info for info in archive.infolist()}
    for name in sorted(members.keys() - locked):
        if _WHEEL_MEMBER.fullmatch(name):
            yield f"{name}: not in the lock"
    for wheel in wheels:
        if (info := members.get(wheel.member)) is None:
            yield f"{wheel.member}: missing"
        elif info.file_size != wheel.size:  # before reading: a size can be a lie of any length
            yield f"{wheel.member}: {info.file_size} bytes, the lock has {wheel.size}"
        elif info.compress_type != zipfile.ZIP_STORED:
            continue  # a fault of its own; what it unpacks to may have no end
        elif (found := _digest(archive, wheel.member)) != wheel.sha256:
            yield f"{wheel.member}: SHA-256 {found}, the lock has {wheel.sha256}"


def _digest(archive: zipfile.ZipFile, name: str) -> str:
    digest = hashlib.sha256()
    try:
        with _member(archive, name) as content:
            while block := content.read(1 << 20):
                digest.update(block)
    except Unreadable as error:
        return f"cannot be had ({error})"
    return digest.hexdigest()


# --- the catalog ----------------------------------------------------------------------------------


def _catalog_faults(archive: zipfile.ZipFile, bundle: Bundle, catalog: Catalog) -> Iterator[str]:
    if bundle.id not in catalog.bundles:
        yield f"{LOCK}: the catalog has no bundle {bundle.id!r}"
        return
    parts = parts_of(bundle.id, catalog)
    held = {wheel.name: wheel for wheel in bundle.wheels}
    yield from (f"{name}: no wheel of it" for name in parts if name not in held)
    required = closure([*parts], bundle.needs)
    for name, wheel in held.items():
        if name in parts:
            yield from parts[name].faults(wheel)
        elif name not in required:
            yield f"{wheel.file}: nothing in the bundle requires it"
    for plugin in catalog.resolve(bundle.id):
        if wheel_of_it := held.get(canonicalize_name(plugin.distribution)):
            yield from _manifest_faults(archive, wheel_of_it, plugin)


def _needs(archive: zipfile.ZipFile, wheel: Wheel, faults: list[str]) -> list[Requirement]:
    """Read all requirements of a wheel; a bundle may be verified on another platform."""
    needs = []
    try:
        lines = parse_email(_inside(archive, wheel, _METADATA))[0].get("requires_dist", [])
    except Unreadable as error:
        faults.append(f"{wheel.file}: METADATA cannot be read: {error}")
        lines = []
    for line in lines:
        with suppress(ValueError):  # as installers do with what is no requirement
            needs.append(Requirement(line))
    return needs


def _manifest_faults(archive: zipfile.ZipFile, wheel: Wheel, plugin: PluginEntry) -> Iterator[str]:
    """Compare the manifest in a plugin's wheel with the catalog."""
    name = f"{plugin.import_package}/{FILE_NAME}"
    try:
        said = _inside(archive, wheel, re.compile(re.escape(name)))
        manifest = parse_manifest(said, f"{wheel.file}: {name}")
    except BackendError as error:
        yield from (f"{wheel.file}: {name}: {fault}" for fault in error.faults)
        return
    except (Unreadable, RecursionError) as error:  # TOML may nest without end
        yield f"{wheel.file}: {name} cannot be read: {error}"
        return
    tag = manifest.requires.hardware_tag
    pairs: Mapping[str, tuple[object, object]] = {
        "id": (manifest.id, plugin.id),
        "api": (manifest.api, plugin.api or manifest.api),
        "hardware-tag": (tag, plugin.requires_tag or tag),
        "provides": (manifest.provided, {**plugin.provides}),
    }
    for key, (found, wanted) in pairs.items():
        if found != wanted:
            yield f"{wheel.file}: the manifest's {key} is {found!r}, the catalog has {wanted!r}"


# --- members --------------------------------------------------------------------------------------


@contextmanager
def _member(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """Open one member; what fails in the block is `Unreadable`, too."""
    if (info := archive.NameToInfo.get(name)) is None:
        raise Unreadable("it is missing")
    if info.flag_bits & _ENCRYPTED:
        raise Unreadable("it is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Unreadable(f"it is compressed by method {info.compress_type}, expected 0 or 8")
    try:
        with archive.open(info) as content:
            yield content
    except _DAMAGE as error:
        raise Unreadable(str(error) or type(error).__name__) from error


def _text(archive: zipfile.ZipFile, name: str) -> str:
    """Read a member as UTF-8 text of at most `LONGEST_TEXT` bytes."""
    with _member(archive, name) as content:
        data = content.read(LONGEST_TEXT + 1)
        if len(data) > LONGEST_TEXT:
            raise Unreadable(f"it is longer than {LONGEST_TEXT} bytes")
        return data.decode()


def _inside(archive: zipfile.ZipFile, wheel: Wheel, name: re.Pattern[str]) -> str:
    """Read the one text of a wheel that has this name."""
    with _member(archive, wheel.member) as content, zipfile.ZipFile(content) as inner:
        names = [each for each in inner.namelist() if name.fullmatch(each)]
        if len(names) != 1:
            raise Unreadable(f"expected one file of that name, found {len(names)}")
        return _text(inner, names[0])
