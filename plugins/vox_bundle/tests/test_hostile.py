"""Archives that are made to harm whoever looks into them: each is a fault in the report, and none
costs memory."""

from __future__ import annotations

import io
import os
import tomllib
import tracemalloc
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from plugins.vox_bundle.tests.samples import TINY, Members, faults, replace, rewritten, swap_a_byte

from vox_bundle.archive import Bundle
from vox_bundle.verify import LONGEST_TEXT, verify
from vox_core.catalog import Catalog

MANIFEST = "vox_test_tiny/vox_plugin.toml"
BOMB = 256 << 20
"""Bytes; zeros of that length deflate to a thousandth."""


def edited(wheel: bytes, content: bytes | None = None, compression: int = 0) -> bytearray:
    """The same wheel with another manifest, or the same one packed otherwise; the manifest last."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = members.pop(MANIFEST)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
        archive.writestr(MANIFEST, manifest if content is None else content, compression)
    return bytearray(out.getvalue())


def entry(wheel: bytearray) -> int:
    """Where the central directory speaks of the manifest: of the last member."""
    return wheel.rindex(b"PK\x01\x02")


def encrypted(wheel: bytes) -> bytearray:
    """By its flags; the content need not be."""
    made = edited(wheel)
    made[entry(made) + 8] |= 1
    return made


def of_method(number: int) -> Callable[[bytes], bytearray]:
    def edit(wheel: bytes) -> bytearray:
        made = edited(wheel)
        made[entry(made) + 10] = number
        return made

    return edit


def no_deflate_stream(wheel: bytes) -> bytearray:
    made = edited(wheel, compression=zipfile.ZIP_DEFLATED)
    start = made.rindex(b"PK\x03\x04") + 30 + len(MANIFEST)
    made[start : start + 4] = b"\xff\xff\xff\xff"
    return made


def another_checksum(wheel: bytes) -> bytearray:
    made = edited(wheel)
    made[entry(made) + 16] ^= 1
    return made


def lies_about_its_length(wheel: bytes) -> bytearray:
    made = edited(wheel, b"#" * BOMB, zipfile.ZIP_DEFLATED)
    made[entry(made) + 24 : entry(made) + 28] = (100).to_bytes(4, "little")
    return made


HOSTILE: dict[str, tuple[Callable[[bytes], bytes | bytearray], str]] = {
    "an encrypted manifest": (encrypted, "it is encrypted"),
    "a method that Python does not know": (of_method(99), "it is compressed by method 99"),
    "LZMA": (of_method(zipfile.ZIP_LZMA), "it is compressed by method 14"),
    "no deflate stream": (no_deflate_stream, "Error -3 while decompressing data"),
    "another checksum": (another_checksum, "Bad CRC-32"),
    "no archive": (lambda wheel: b"x" * 100, "File is not a zip file"),
    "half an archive": (lambda wheel: wheel[: len(wheel) // 2], "File is not a zip file"),
    "no manifest": (
        lambda wheel: edited(wheel).replace(b"vox_plugin", b"vox_plugim"),
        "expected one file",
    ),
    "not UTF-8": (lambda wheel: edited(wheel, b"\xff"), "'utf-8' codec can't decode"),
    "a bomb": (
        lambda wheel: edited(wheel, b"#" * BOMB, zipfile.ZIP_DEFLATED),
        f"it is longer than {LONGEST_TEXT} bytes",
    ),
    "a bomb that says it is small": (lies_about_its_length, "Bad CRC-32"),
}


def swapped(bundle: Bundle, folder: Path, wheel: bytes) -> Path:
    """The bundle with another wheel, and a lock that vouches for it."""

    def edit(members: Members) -> None:
        members[f"wheels/{TINY}"] = wheel
        lock = tomllib.loads(members["pylock.toml"].decode())
        (locked,) = lock["packages"][1]["wheels"]
        digest = sha256(wheel).hexdigest()
        replace("pylock.toml", locked["hashes"]["sha256"], digest)(members)
        replace("pylock.toml", f"size = {locked['size']}", f"size = {len(wheel)}")(members)

    return rewritten(bundle, folder, edit)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_wheel_is_told(
    bundle: Bundle, catalog: Catalog, wheels: Path, tmp_path: Path, case: str
) -> None:
    edit, said = HOSTILE[case]
    path = swapped(bundle, tmp_path, bytes(edit((wheels / TINY).read_bytes())))
    tracemalloc.start()
    try:
        found = faults(lambda: verify(path, catalog), "B008")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    *others, manifest = found
    assert manifest.startswith(f"{TINY}: {MANIFEST} cannot be read: {said}"), found
    assert all(f"{TINY}: METADATA cannot be read: {said}" in each for each in others)
    assert peak < 8 * LONGEST_TEXT < BOMB


def test_a_manifest_that_nests_without_end(
    bundle: Bundle, catalog: Catalog, wheels: Path, tmp_path: Path
) -> None:
    wheel = edited((wheels / TINY).read_bytes(), b"id = " + b"[" * 100_000)
    (found,) = faults(lambda: verify(swapped(bundle, tmp_path, bytes(wheel)), catalog), "B008")
    assert found.startswith(f"{TINY}: {MANIFEST}: not TOML: ")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bundle_that_is_compressed_is_not_unpacked(
    bundle: Bundle, catalog: Catalog, tmp_path: Path, method: int
) -> None:
    """Its wheel is another one than the lock's, but who would know has unpacked it."""
    path = rewritten(bundle, tmp_path, swap_a_byte, method)
    found = faults(lambda: verify(path, catalog), "B008")
    assert f"wheels/{TINY}: compressed or encrypted; members are stored as they are" in found
    assert not [each for each in found if "SHA-256" in each]


def test_a_lock_without_end(bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    path = rewritten(
        bundle, tmp_path, lambda all: all.update({"pylock.toml": b"#" * (LONGEST_TEXT + 1)})
    )
    found = faults(lambda: verify(path, catalog), "B008")
    assert f"pylock.toml: cannot be read: it is longer than {LONGEST_TEXT} bytes" in found


def test_what_cannot_be_opened(catalog: Catalog, tmp_path: Path) -> None:
    """Bad input, and not a failure in the middle of work: exit 2."""
    from vox_core.errors import BackendError

    for path in (tmp_path / "nowhere.zip", tmp_path):
        with pytest.raises(BackendError) as caught:
            verify(path, catalog)
        assert (caught.value.code, caught.value.exit_code) == ("VOX-B012", 2)
        assert caught.value.where == os.fspath(path)
