"""A bundle file read without trust: every member against its lock, and both against the catalog.

No member is unpacked that the lock does not list. Only stored and deflated members are read (an
LZMA stream names the memory that it wants), of a text at most `LONGEST_TEXT` bytes, and damage of
any kind becomes `Unreadable`. A wheel beside the catalog's own has to be required by one of them,
directly or not: a label that says `dependencies = true` admits no other.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from packaging.metadata import parse_email
from packaging.pylock import Package, Pylock, PylockValidationError
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import TypeAdapter, ValidationError

from vox_core import files
from vox_core.catalog import Catalog, PluginEntry
from vox_core.errors import BackendError
from vox_core.host.manifest import FILE_NAME, parse_manifest
from vox_core.install.bundle.archive import (
    ABOUT,
    LOCK,
    WHEELS,
    About,
    Bundle,
    Part,
    Wheel,
    parts_of,
)

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


class Unreadable(Exception):
    """Why a member cannot be read, in words that follow `cannot be read: `."""


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive at `path`.

    Raises:
        BackendError: B008, it is no zip archive; B012, there is no such file to read.
    """
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
            raise invalid(path, [f"not a zip archive: {error}"]) from error
        with archive:
            yield archive


def verify(file: Path, catalog: Catalog) -> Bundle:
    """Check every member of a bundle file against its lock, and both against the catalog.

    Raises:
        BackendError: B008, with every fault; B012, there is no such file.
        StorageError: the file cannot be read.
    """
    with opened(file) as archive:
        return verified(file, archive, catalog)


def verified(file: Path, archive: zipfile.ZipFile, catalog: Catalog) -> Bundle:
    """`verify`, for a file that is open already."""
    faults = _member_faults(archive.infolist())
    about = _about(archive, faults)
    wheels = _locked(archive, faults)
    members = {info.orig_filename: info for info in archive.infolist()}
    sound = [wheel for wheel in wheels if _is_sound(archive, members, wheel, faults)]
    unlocked = {name for name in members if _WHEEL_MEMBER.fullmatch(name)}
    unlocked -= {wheel.member for wheel in wheels}
    faults += [f"{name}: not in the lock" for name in sorted(unlocked)]
    if about is not None:
        faults += _catalog_faults(archive, about, wheels, sound, catalog)
    if faults or about is None:
        raise invalid(file, faults)
    return Bundle(file, about, tuple(wheels))


def requires(archive: zipfile.ZipFile, wheel: Wheel, faults: list[str]) -> list[str]:
    """The requirements in a wheel's metadata; a fault if they cannot be read."""
    try:
        with archive_in(archive, wheel.member) as unpacked:
            told = metadata_text(unpacked, "METADATA")
    except Unreadable as error:
        faults.append(f"{wheel.file}: METADATA cannot be read: {error}")
        return []
    return parse_email(told)[0].get("requires_dist", [])


def unpack(bundle: Bundle, wheels: Iterable[Wheel], folder: Path) -> None:
    """Write wheels of a verified bundle into `folder`; uv checks their hashes once more.

    Raises:
        BackendError: B008, the file has changed.
        StorageError: a wheel cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with opened(bundle.file) as archive:
        for wheel in wheels:
            path = folder / wheel.file
            try:
                with (
                    member(archive, wheel.member) as content,
                    files.storage_errors(path),
                    path.open("xb") as out,
                ):
                    shutil.copyfileobj(content, out)
            except Unreadable as error:
                raise invalid(bundle.file, [f"{wheel.member}: {error}"]) from error


def invalid(path: Path, faults: Sequence[str]) -> BackendError:
    """The error with every fault of a bundle."""
    return BackendError(
        "B008",
        "the bundle is not what its lock and the catalog say",
        where=path,
        faults=faults,
        remedy="do not use it; get it again from where it was made, or make a new one: "
        "vox bundle build",
    )


# --- the lock -------------------------------------------------------------------------------------


def _member_faults(infos: Sequence[zipfile.ZipInfo]) -> list[str]:
    # Names that differ in case alone are one file on some disks.
    counted = Counter(info.orig_filename.lower() for info in infos)
    faults = [f"{name}: stands {count} times" for name, count in counted.items() if count > 1]
    for info in infos:
        name = info.orig_filename
        parts = re.split(r"[/\\]", name)
        if ".." in parts or parts[0] == "" or parts[0].endswith(":"):
            faults.append(f"{name}: leads out of the archive")
        elif name not in (ABOUT, LOCK) and not _WHEEL_MEMBER.fullmatch(name):
            faults.append(f"{name}: does not belong in a bundle")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            faults.append(f"{name}: compressed or encrypted; members are stored as they are")
    return faults


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
    """The one wheel of a package, or why it cannot be used."""
    if len(package.wheels or ()) != 1 or package.version is None:
        return "expected a version and one wheel"
    (wheel,) = package.wheels or ()
    path, sha256 = wheel.path or "", wheel.hashes.get("sha256")
    if not _WHEEL_MEMBER.fullmatch(path) or wheel.size is None or sha256 is None:
        return f"expected the path of a wheel under {WHEELS}, its size and its sha256"
    # packaging has compared the file's name with the package's name and version.
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
        pass  # a fault of its own; what it unpacks to may have no end
    elif (found := _digest(archive, info)) != wheel.sha256:
        faults.append(f"{wheel.member}: SHA-256 {found}, the lock has {wheel.sha256}")
    else:
        return True
    return False


def _digest(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    digest = hashlib.sha256()
    try:
        with member(archive, info.filename) as content:
            while block := content.read(1 << 20):
                digest.update(block)
    except Unreadable as error:
        return f"cannot be had ({error})"
    return digest.hexdigest()


# --- the catalog ----------------------------------------------------------------------------------


def _catalog_faults(
    archive: zipfile.ZipFile,
    about: About,
    wheels: Sequence[Wheel],
    sound: Sequence[Wheel],
    catalog: Catalog,
) -> list[str]:
    if about.id not in catalog.bundles:
        return [f"{ABOUT}: the catalog has no bundle {about.id!r}"]
    faults = []
    plugins = catalog.resolve(about.id)
    if about.plugins != (ids := [plugin.id for plugin in plugins]):
        said, wanted = ", ".join(about.plugins) or "none", ", ".join(ids) or "none"
        faults.append(f"{ABOUT}: plugins {said}, the catalog has {wanted}")
    parts = parts_of(about.id, catalog)
    locked = {wheel.name: wheel for wheel in wheels}
    faults += [f"{name}: no wheel of it" for name in parts if name not in locked]
    for name, wheel in locked.items():
        if name in parts:
            faults += parts[name].faults(wheel)
        elif not about.dependencies:
            faults.append(f"{wheel.file}: the catalog's bundle does not hold it")
    if about.dependencies:
        unasked = _strangers(archive, sound, parts, faults)
        faults += [f"{wheel.file}: nothing in the bundle requires it" for wheel in unasked]
    intact = {wheel.name: wheel for wheel in sound}
    for plugin in plugins:
        if wheel_of_it := intact.get(canonicalize_name(plugin.distribution)):
            faults += _manifest_faults(archive, wheel_of_it, plugin)
    return faults


def _strangers(
    archive: zipfile.ZipFile,
    wheels: Iterable[Wheel],
    parts: Mapping[str, Part],
    faults: list[str],
) -> list[Wheel]:
    """The sound wheels that neither are parts nor are required, directly or not, by one.

    Platform markers do not count: a bundle may be verified on another platform.
    """
    held = {wheel.name: wheel for wheel in wheels}
    wanted: dict[str, set[str]] = {name: set() for name in parts if name in held}
    waiting = [*wanted]
    needs: dict[str, list[Requirement]] = {}
    while waiting:
        name = waiting.pop()
        if name not in needs:
            needs[name] = [*_valid(requires(archive, held[name], faults))]
        for need in needs[name]:
            key = canonicalize_name(need.name)
            if key not in held or not _counts(need, wanted[name]):
                continue
            extras = {canonicalize_name(each) for each in need.extras}
            if key not in wanted or extras - wanted[key]:
                wanted.setdefault(key, set()).update(extras)
                waiting.append(key)
    return [wheel for name, wheel in held.items() if name not in wanted]


def _valid(lines: Iterable[str]) -> Iterator[Requirement]:
    for line in lines:
        with suppress(ValueError):  # as installers do with what is no requirement
            yield Requirement(line)


def _counts(need: Requirement, extras: Collection[str]) -> bool:
    """Whether a requirement belongs to no extra, or to one of these."""
    marker = str(need.marker or "")
    if "extra" not in marker:
        return True
    return any(f'"{extra}"' in marker.replace("_", "-").lower() for extra in extras)


def _manifest_faults(archive: zipfile.ZipFile, wheel: Wheel, plugin: PluginEntry) -> list[str]:
    """How the manifest in a plugin's wheel differs from the catalog."""
    name = f"{plugin.import_package}/{FILE_NAME}"
    try:
        with archive_in(archive, wheel.member) as unpacked:
            said = text(unpacked, name)
        manifest = parse_manifest(said, f"{wheel.file}: {name}")
    except BackendError as error:
        return [f"{wheel.file}: {name}: {fault}" for fault in error.faults]
    except (Unreadable, RecursionError) as error:  # TOML may nest without end
        return [f"{wheel.file}: {name} cannot be read: {error}"]
    tag = manifest.requires.hardware_tag
    pairs = {
        "id": (manifest.id, plugin.id),
        "api": (manifest.api, plugin.api or manifest.api),
        "hardware-tag": (tag, plugin.requires_tag or tag),
        "provides": (manifest.provided, {**plugin.provides}),
    }
    return [
        f"{wheel.file}: the manifest's {key} is {said!r}, the catalog has {wanted!r}"
        for key, (said, wanted) in pairs.items()
        if said != wanted
    ]


# --- members --------------------------------------------------------------------------------------


@contextmanager
def member(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """The content of one member.

    Raises:
        Unreadable: it cannot be read, now or while the block reads it.
    """
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise Unreadable("it is not there") from None
    if info.flag_bits & _ENCRYPTED:
        raise Unreadable("it is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Unreadable(f"it is compressed by method {info.compress_type}, expected 0 or 8")
    try:
        with archive.open(info) as content:
            yield content
    except _DAMAGE as error:
        raise Unreadable(str(error) or type(error).__name__) from error


@contextmanager
def archive_in(archive: zipfile.ZipFile, name: str) -> Iterator[zipfile.ZipFile]:
    """The archive that a member is.

    Raises:
        Unreadable: it is none, or cannot be read.
    """
    with member(archive, name) as content, zipfile.ZipFile(content) as inner:
        yield inner


def text(archive: zipfile.ZipFile, name: str) -> str:
    """A member as UTF-8 text of at most `LONGEST_TEXT` bytes.

    Raises:
        Unreadable: it is none, longer, or cannot be read.
    """
    with member(archive, name) as content:
        data = content.read(LONGEST_TEXT + 1)
        if len(data) > LONGEST_TEXT:
            raise Unreadable(f"it is longer than {LONGEST_TEXT} bytes")
        return data.decode()


def metadata_text(archive: zipfile.ZipFile, name: str) -> str:
    """A file of the .dist-info folder of a wheel; empty if it is not there.

    Raises:
        Unreadable: it cannot be read, or there is not one such folder.
    """
    tops = {each.partition("/")[0] for each in archive.namelist()}
    infos = [each for each in tops if each.endswith(".dist-info")]
    if len(infos) != 1:
        raise Unreadable(f"expected one .dist-info folder, found {len(infos)}")
    path = f"{infos[0]}/{name}"
    return text(archive, path) if path in archive.NameToInfo else ""
