"""Bundles tampered with: every fault is told."""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from plugins.vox_bundle.tests.samples import (
    TINY,
    Members,
    add,
    changed,
    faults,
    remove,
    replace,
    rewritten,
    swap_a_byte,
)
from tests.core.install_samples import wheel

from vox_bundle.archive import Bundle
from vox_bundle.verify import verify
from vox_core.catalog import Catalog


def lock_another_wheel(members: Members) -> None:
    """One who replaces a wheel and corrects the lock."""
    swap_a_byte(members)
    with_it = sha256(members[f"wheels/{TINY}"]).hexdigest()
    table = tomllib.loads(members["pylock.toml"].decode())
    locked = table["packages"][1]["wheels"][0]["hashes"]["sha256"]
    replace("pylock.toml", locked, with_it)(members)


TAMPERED: dict[str, tuple[Callable[[Members], object], str]] = {
    "a byte": (swap_a_byte, f"wheels/{TINY}: SHA-256"),
    "a truncated wheel": (add(f"wheels/{TINY}"), f"wheels/{TINY}: 1 bytes, the lock has"),
    "a wheel left out": (remove(f"wheels/{TINY}"), f"wheels/{TINY}: missing"),
    "a wheel more": (add("wheels/a-1-py3-none-any.whl"), "wheels/a-1-py3-none-any.whl: not in the"),
    "a file more": (add("install.sh"), "install.sh: does not belong in a bundle"),
    "a folder": (add("wheels/deeper/"), "wheels/deeper/: does not belong in a bundle"),
    "a way out": (add("wheels/../../x.whl"), "wheels/../../x.whl: does not belong in a bundle"),
    "an absolute path": (add("/etc/x.whl"), "/etc/x.whl: does not belong in a bundle"),
    "a drive": (add("C:\\x.whl"), "C:\\x.whl: does not belong in a bundle"),
    "no lock": (remove("pylock.toml"), "pylock.toml: cannot be read: it is missing"),
    "a lock that is none": (add("pylock.toml", b"x = ["), "pylock.toml: cannot be read"),
    "a lock of nothing": (add("pylock.toml", b"x = 1"), "pylock.toml: "),
    "a lock that leads out": (
        replace("pylock.toml", "wheels/vox_test_tiny", "wheels/../vox_test_tiny"),
        "pylock.toml: vox-test-tiny: expected the path of a wheel under wheels/",
    ),
    "another version": (
        replace("pylock.toml", 'lib"\nversion = "1.0"', 'lib"\nversion = "1.1"'),
        "pylock.toml: cannot be read: Version in 'vox_test_lib-1.0-py3-none-any.whl' is not",
    ),
    "no label": (
        replace("pylock.toml", "[tool.vox]", "[tool.other]"),
        "pylock.toml: the catalog has no bundle ''",
    ),
    "a label of another kind": (
        replace("pylock.toml", "[tool.vox]", "[tool]\nvox = 1\n[tool.other]"),
        "pylock.toml: the catalog has no bundle ''",
    ),
    "another bundle": (
        replace("pylock.toml", 'bundle = "small"', 'bundle = "smaller"'),
        "pylock.toml: the catalog has no bundle 'smaller'",
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_told(bundle: Bundle, catalog: Catalog, tmp_path: Path, case: str) -> None:
    edit, said = TAMPERED[case]
    path = rewritten(bundle, tmp_path, edit)
    found = faults(lambda: verify(path, catalog), "B008")
    assert any(each.startswith(said) for each in found), found


def test_all_faults_come_together(bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    cases = ["a byte", "a wheel more", "a file more", "a way out"]

    def edit(members: Members) -> None:
        for case in cases:
            TAMPERED[case][0](members)

    found = faults(lambda: verify(rewritten(bundle, tmp_path, edit), catalog), "B008")
    assert len(found) == len(cases)


def test_a_member_that_stands_twice(bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    """Or under a name that some disks take for the same."""
    path = rewritten(bundle, tmp_path, add(f"wheels/{TINY.upper()[:-4]}.whl"))
    found = faults(lambda: verify(path, catalog), "B008")
    assert f"wheels/{TINY}: stands 2 times" in found


def test_compressed_members(bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    path = rewritten(bundle, tmp_path, lambda members: None, zipfile.ZIP_DEFLATED)
    assert len(faults(lambda: verify(path, catalog), "B008")) == 3


def test_a_bit_that_turned(bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    """The archive's own checksum sees it before SHA-256 does."""
    with zipfile.ZipFile(bundle.file) as archive:
        header = archive.getinfo(f"wheels/{TINY}").header_offset
    content = bytearray(bundle.file.read_bytes())
    content[header + 200] ^= 1
    path = tmp_path / "turned.zip"
    path.write_bytes(content)
    found = faults(lambda: verify(path, catalog), "B008")
    assert [f"wheels/{TINY}: SHA-256 cannot be had" in each for each in found] == [True]


def test_what_is_no_archive(catalog: Catalog, tmp_path: Path) -> None:
    path = tmp_path / "no.zip"
    path.write_bytes(b"PK\x03\x04")
    assert "not a zip archive" in faults(lambda: verify(path, catalog), "B008")[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (">=1,<2", ">=2", f"{TINY}: the catalog wants >=2"),
        ('api = "2.0"', 'api = "2.1"', f"{TINY}: the manifest's api is '2.0', the catalog has"),
        ('["vox_event"]', '["vox_doctor"]', f"{TINY}: the manifest's provides is"),
        ('tag = "nvidia"', 'tag = "amd"', f"{TINY}: the manifest's hardware-tag is 'nvidia', the"),
        ("lib = ", 'more = "local:m", vox-test-lib = ', "vox-test-more: no wheel of it"),
        ('"vox_test_tiny"', '"other"', f"{TINY}: other/vox_plugin.toml cannot be read"),
    ],
)
def test_a_catalog_that_says_otherwise(
    bundle: Bundle, tmp_path: Path, old: str, new: str, said: str
) -> None:
    found = faults(lambda: verify(bundle.file, changed(tmp_path, old, new)), "B008")
    assert [each.startswith(said) for each in found] == [True], found


def test_a_lock_corrected_for_another_wheel(bundle: Bundle, tmp_path: Path) -> None:
    """The catalog pins what the lock alone could not."""
    (tiny,) = (wheel for wheel in bundle.wheels if wheel.file == TINY)
    pinned = changed(tmp_path, 'api = "2.0"', f'sha256 = {{ "{TINY}" = "{tiny.sha256}" }}')
    assert verify(bundle.file, pinned).wheels == bundle.wheels
    path = rewritten(bundle, tmp_path, lock_another_wheel)
    found = faults(lambda: verify(path, pinned), "B008")
    assert any(each.endswith(f"the catalog has {tiny.sha256}") for each in found)


def test_a_pin_of_other_files(bundle: Bundle, tmp_path: Path) -> None:
    pinned = changed(tmp_path, 'api = "2.0"', f'sha256 = {{ "a.whl" = "{"0" * 64}" }}')
    found = faults(lambda: verify(bundle.file, pinned), "B008")
    assert found == (f"{TINY}: not one of the files that the catalog pins",)


# --- dependencies ---------------------------------------------------------------------------------


def packed(members: Members, folder: Path, name: str, needs: Sequence[str] = ()) -> str:
    """One who adds a wheel and locks it."""
    file = wheel(str(folder), name, "1.0", {f"{name}.py": ""}, needs)
    content = (folder / file).read_bytes()
    members[f"wheels/{file}"] = content
    table = (
        f'\n[[packages]]\nname = "{name}"\nversion = "1.0"\n[[packages.wheels]]\n'
        f'path = "wheels/{file}"\nsize = {len(content)}\n'
        f'hashes = {{ sha256 = "{sha256(content).hexdigest()}" }}\n'
    )
    lock, label = members["pylock.toml"].split(b"\n[tool.vox]")
    members["pylock.toml"] = lock + table.encode() + b"\n[tool.vox]" + label
    return file


def test_what_nothing_requires_is_not_let_in(
    bundle: Bundle, catalog: Catalog, tmp_path: Path
) -> None:
    def edit(members: Members) -> None:
        packed(members, tmp_path, "not-there", ["deeper; sys_platform == 'elsewhere'"])
        packed(members, tmp_path, "deeper", ["quick"])
        for name in ("quick", "evil"):
            packed(members, tmp_path, name)

    path = rewritten(bundle, tmp_path, edit)
    assert faults(lambda: verify(path, catalog), "B008") == (
        "evil-1.0-py3-none-any.whl: nothing in the bundle requires it",
    )


def test_what_is_required_is_let_in_and_told(
    bundle: Bundle, catalog: Catalog, tmp_path: Path
) -> None:
    path = rewritten(bundle, tmp_path, lambda members: packed(members, tmp_path, "not-there"))
    sound = verify(path, catalog)
    assert sound.dependencies(catalog) == ["not-there 1.0"]
    assert bundle.dependencies(catalog) == []
