"""Bundles: built from real packages, tampered with, installed into a real environment.

A catalog of one plugin and the library it is built on lies in a folder with their sources; the
bundle is built once. The environment can open no socket, so an installation that needs the network
fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import pip
import pytest
from packaging.pylock import Pylock

from vox_core.catalog import Catalog, load_catalog, read_catalogs
from vox_core.errors import BackendError, ConfigError, PluginError
from vox_core.host.bundle.apply import apply
from vox_core.host.bundle.archive import Bundle
from vox_core.host.bundle.build import build
from vox_core.host.bundle.verify import verify

TINY, LIB = "vox_test_tiny-1.0-py3-none-any.whl", "vox_test_lib-1.0-py3-none-any.whl"
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.0"
requires-python = ">=3.11"
dependencies = {needs}
"""
MANIFEST = """
id = "tiny"
name = "Tiny"
version = "1.0"
api = "1.0"
licence = "MIT"
extension-points = ["Observer"]
[requires]
hardware-tag = "nvidia"
"""
CATALOG = """
[[plugin]]
id = "tiny"
description = "a tiny plugin"
payload-kind = "code"
extension-points = ["Observer"]
default-source = "local:tiny"
distribution = "vox-test-tiny"
import-package = "vox_test_tiny"
libraries = { vox-test-lib = "local:lib" }
requires-tag = "nvidia"
specifier = ">=1,<2"
api = "1.0"
licence = "MIT"
bundled-in = ["small"]
[[bundle]]
id = "small"
description = "a \\"small\\" bundle"
plugins = ["tiny"]
"""


def package(folder: Path, name: str, needs: list[str]) -> Path:
    module = folder / name.replace("-", "_")
    module.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, needs=needs))
    (module / "__init__.py").write_text("raise SystemExit('imported')\n")
    return module


def sources(folder: Path, catalog: str = CATALOG, manifest: str = MANIFEST) -> Catalog:
    """A catalog with the packages that it names."""
    package(folder / "lib", "vox-test-lib", [])
    module = package(folder / "tiny", "vox-test-tiny", ["vox-test-lib", "not-there"])
    (module / "vox_plugin.toml").write_text(manifest)
    (folder / "catalog.toml").write_text(catalog)
    return read_catalogs([folder / "catalog.toml"])


def changed(folder: Path, old: str, new: str) -> Catalog:
    """The same catalog, but for one thing."""
    assert CATALOG.count(old) == 1
    path = folder / "changed.toml"
    path.write_text(CATALOG.replace(old, new))
    return read_catalogs([path])


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def bundle(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build("small", catalog, tmp_path_factory.mktemp("out") / "small.zip", isolation=False)


@pytest.fixture(scope="module")
def wheels(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the bundle."""
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(bundle.file) as archive:
        for wheel in bundle.wheels:
            (folder / wheel.file).write_bytes(archive.read(wheel.member))
    return folder


def faults(run: Callable[[], object], code: str) -> tuple[str, ...]:
    with pytest.raises((BackendError, PluginError)) as caught:
        run()
    assert caught.value.code == f"VOX-{code}"
    return caught.value.faults


# --- build ----------------------------------------------------------------------------------------


def test_what_a_bundle_holds(bundle: Bundle, catalog: Catalog) -> None:
    with zipfile.ZipFile(bundle.file) as archive:
        assert archive.namelist() == [
            "BUNDLE.toml",
            "pylock.toml",
            f"wheels/{LIB}",
            f"wheels/{TINY}",
        ]
        about = tomllib.loads(archive.read("BUNDLE.toml").decode())
        lock = Pylock.from_dict(tomllib.loads(archive.read("pylock.toml").decode()))
        contents = {name: archive.read(name) for name in archive.namelist()}
        assert {info.date_time[0] for info in archive.infolist()} == {1980}  # no clock was asked
    assert about.pop("vox")
    assert about == {
        "id": "small",
        "description": 'a "small" bundle',
        "plugins": ["tiny"],
        "python": "any",
        "platform": "any",
        "catalog": catalog.digest,
        "dependencies": False,
    }
    for locked in lock.packages:
        (wheel,) = locked.wheels or ()
        content = contents[wheel.path or ""]
        assert (wheel.size, wheel.hashes["sha256"]) == (len(content), sha256(content).hexdigest())


def test_it_verifies(bundle: Bundle, catalog: Catalog) -> None:
    assert verify(bundle.file, catalog) == bundle


def test_equal_content_makes_equal_bytes(
    bundle: Bundle, catalog: Catalog, wheels: Path, tmp_path: Path
) -> None:
    """Whether the wheels are made, or taken from a folder with other times."""
    again = build("small", catalog, tmp_path / "a" / "again.zip", wheel_folders=[wheels])
    assert again.file.read_bytes() == bundle.file.read_bytes()


def test_no_wheel_of_another_version_or_platform_is_taken(
    catalog: Catalog, wheels: Path, tmp_path: Path
) -> None:
    """Both would be newer; neither is what the catalog allows or this Python can install."""
    for name in ("vox_test_tiny-2.0-py3-none-any.whl", "vox_test_tiny-1.5-cp39-cp39-win32.whl"):
        (tmp_path / name).write_bytes(b"")
    made = build("small", catalog, tmp_path / "small.zip", wheel_folders=[wheels, tmp_path])
    assert [wheel.file for wheel in made.wheels] == [LIB, TINY]


def test_all_missing_sources_are_told(tmp_path: Path) -> None:
    catalog = sources(tmp_path)
    shutil.rmtree(tmp_path / "lib")
    shutil.rmtree(tmp_path / "tiny")
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip"), "B010")
    assert found == (
        f"vox-test-lib: {tmp_path / 'lib'} is not there",
        f"vox-test-tiny: {tmp_path / 'tiny'} is not there",
    )


def test_a_wheel_that_is_not_the_pinned_one(catalog: Catalog, wheels: Path, tmp_path: Path) -> None:
    pinned = changed(tmp_path, 'api = "1.0"', f'sha256 = {{ "{TINY}" = "{"0" * 64}" }}')
    found = faults(
        lambda: build("small", pinned, tmp_path / "b.zip", wheel_folders=[wheels]), "B010"
    )
    assert [f"{TINY}: SHA-256" in each for each in found] == [True]
    assert not (tmp_path / "b.zip").exists()


def test_a_source_that_gives_something_else(tmp_path: Path) -> None:
    catalog = sources(tmp_path, CATALOG.replace('"local:lib"', '"local:tiny"'))
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip", isolation=False), "B010")
    assert found == ("vox-test-lib: its source gives another distribution",)


def test_what_pip_says_of_a_broken_source(tmp_path: Path) -> None:
    catalog = sources(tmp_path)
    (tmp_path / "lib" / "pyproject.toml").write_text("[build-system\n")
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip", isolation=False), "X003")
    assert "lib" in "\n".join(found)


def test_a_yanked_plugin_is_not_bundled(tmp_path: Path) -> None:
    catalog = changed(tmp_path, 'api = "1.0"', 'status = "yanked"\nadvisory = "it leaks"')
    found = faults(lambda: build("small", catalog, tmp_path / "b.zip"), "B009")
    assert found == ("tiny: yanked: it leaks",)


def test_with_dependencies(
    catalog: Catalog, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip resolves them, here from the folder of wheels alone."""
    package(tmp_path / "not-there", "not-there", [])
    how = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *how, str(tmp_path / "not-there")], check=True
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    made = build(
        "small",
        catalog,
        tmp_path / "all.zip",
        wheel_folders=[wheels, tmp_path],
        with_dependencies=True,
    )
    assert [wheel.name for wheel in made.wheels] == ["not-there", "vox-test-lib", "vox-test-tiny"]
    assert verify(made.file, catalog).about.dependencies


def test_the_bundle_that_ships_has_the_core_and_the_engine(tmp_path: Path) -> None:
    made = build("vox-cpu", load_catalog(environ={}), tmp_path / "cpu.zip", isolation=False)
    assert [wheel.name for wheel in made.wheels] == ["vox-ml", "vox-ml-cpu", "vox-ml-torch"]
    assert verify(made.file, load_catalog(environ={})) == made


# --- verify ---------------------------------------------------------------------------------------

Members: TypeAlias = dict[str, bytes]


def rewritten(
    bundle: Bundle, folder: Path, edit: Callable[[Members], object], compression: int = 0
) -> Path:
    """A copy of the bundle file with other members."""
    with zipfile.ZipFile(bundle.file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    path = folder / "tampered.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def replace(member: str, old: str, new: str) -> Callable[[Members], None]:
    def edit(members: Members) -> None:
        text = members[member].decode()
        assert text.count(old) >= 1
        members[member] = text.replace(old, new).encode()

    return edit


def add(name: str, content: bytes = b"x") -> Callable[[Members], None]:
    return lambda members: members.update({name: content})


def remove(name: str) -> Callable[[Members], None]:
    return lambda members: members.pop(name) and None


def swap_a_byte(members: Members) -> None:
    content = bytearray(members[f"wheels/{TINY}"])
    content[100] ^= 1
    members[f"wheels/{TINY}"] = bytes(content)


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
    "a way out": (add("wheels/../../x.whl"), "wheels/../../x.whl: leads out of the archive"),
    "an absolute path": (add("/etc/x.whl"), "/etc/x.whl: leads out of the archive"),
    "a drive": (add("C:\\x.whl"), "C:\\x.whl: leads out of the archive"),
    "no lock": (remove("pylock.toml"), "pylock.toml: missing"),
    "a lock that is none": (add("pylock.toml", b"x = ["), "pylock.toml: cannot be read"),
    "a lock of nothing": (add("pylock.toml", b"x = 1"), "pylock.toml: "),
    "a lock that leads out": (
        replace("pylock.toml", "wheels/vox_test_tiny", "wheels/../vox_test_tiny"),
        "pylock.toml: vox-test-tiny: expected the path of a wheel under wheels/",
    ),
    "another version": (
        replace("pylock.toml", 'version = "1.0"\n\n', 'version = "1.1"\n\n'),
        "pylock.toml: Version in 'vox_test_lib-1.0-py3-none-any.whl' is not consistent with",
    ),
    "no label": (remove("BUNDLE.toml"), "BUNDLE.toml: missing"),
    "another bundle": (
        replace("BUNDLE.toml", 'id = "small"', 'id = "smaller"'),
        "BUNDLE.toml: the catalog has no bundle 'smaller'",
    ),
    "other plugins": (
        replace("BUNDLE.toml", '["tiny"]', '["tiny", "more"]'),
        "BUNDLE.toml: plugins tiny, more, the catalog has tiny",
    ),
    "an unknown key": (add("BUNDLE.toml", b"x = 1"), "BUNDLE.toml: x: unexpected keyword"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_told(bundle: Bundle, catalog: Catalog, tmp_path: Path, case: str) -> None:
    edit, said = TAMPERED[case]
    path = rewritten(bundle, tmp_path, edit)
    found = faults(lambda: verify(path, catalog), "B008")
    assert any(each.startswith(said) for each in found), found


def test_all_faults_come_together(bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    cases = ["a byte", "a wheel more", "a file more", "a way out", "other plugins"]

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
    assert len(faults(lambda: verify(path, catalog), "B008")) == 4


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
        ('api = "1.0"', 'api = "1.1"', f"{TINY}: the manifest's api is '1.0', the catalog has"),
        ('["Observer"]', '["MlBackend"]', f"{TINY}: the manifest's extension-points is"),
        ('requires-tag = "nvidia"\n', "", f"{TINY}: the manifest's hardware-tag is 'nvidia', the"),
        ('{ vox-test-lib = "local:lib" }', "{}", f"{LIB}: the catalog's bundle does not hold it"),
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
    pinned = changed(tmp_path, 'api = "1.0"', f'sha256 = {{ "{TINY}" = "{tiny.sha256}" }}')
    assert verify(bundle.file, pinned).wheels == bundle.wheels
    path = rewritten(bundle, tmp_path, lock_another_wheel)
    found = faults(lambda: verify(path, pinned), "B008")
    assert any(each.endswith(f"the catalog has {tiny.sha256}") for each in found)


def test_a_pin_of_other_files(bundle: Bundle, tmp_path: Path) -> None:
    pinned = changed(tmp_path, 'api = "1.0"', f'sha256 = {{ "a.whl" = "{"0" * 64}" }}')
    found = faults(lambda: verify(bundle.file, pinned), "B008")
    assert found == (f"{TINY}: not one of the files that the catalog pins",)


# --- apply ----------------------------------------------------------------------------------------

NO_NETWORK = """
import socket
def refuse(*args): raise SystemExit("the network was used")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip and nothing else."""
    folder = tmp_path_factory.mktemp("target")
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    return folder / "bin" / "python"


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_OVERRIDE_HARDWARE", "nvidia")


@pytest.fixture(autouse=True)
def _as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test installed is taken out again."""
    yield
    if "python" in request.fixturenames:
        python = request.getfixturevalue("python")
        if names := [*installed(python)]:
            subprocess.run([python, "-m", "pip", "-q", "uninstall", "-y", *names], check=True)


def installed(python: Path) -> Mapping[str, str]:
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    stems = [each.stem.partition("-") for each in site.glob("*.dist-info")]
    return {name: version for name, _, version in stems}


@pytest.mark.usefixtures("nvidia")
def test_apply_installs_the_wheels_and_nothing_else(
    bundle: Bundle,
    catalog: Catalog,
    python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the dependency that nobody has, nor anything that pip's settings would add."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://localhost:9/simple")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path))
    assert apply(bundle.file, catalog, str(python)) == bundle
    assert installed(python) == {"vox_test_tiny": "1.0", "vox_test_lib": "1.0"}
    assert apply(bundle.file, catalog, str(python)) == bundle  # once more changes nothing


@pytest.mark.usefixtures("nvidia")
def test_a_tampered_bundle_is_not_applied(
    bundle: Bundle, catalog: Catalog, python: Path, tmp_path: Path
) -> None:
    path = rewritten(bundle, tmp_path, swap_a_byte)
    faults(lambda: apply(path, catalog, str(python)), "B008")
    assert installed(python) == {}


def test_the_tag_that_a_plugin_requires_is_enforced(
    bundle: Bundle, catalog: Catalog, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_OVERRIDE_HARDWARE", "none")
    found = faults(lambda: apply(bundle.file, catalog, str(python)), "B009")
    assert found == ("tiny: needs a device with tag nvidia (found: cpu)",)
    assert installed(python) == {}


@pytest.mark.usefixtures("nvidia")
def test_a_bundle_for_another_python_and_platform(
    bundle: Bundle, catalog: Catalog, python: Path, tmp_path: Path
) -> None:
    edit = replace("BUNDLE.toml", '"any"', '"2.7"')
    path = rewritten(bundle, tmp_path, edit)
    found = faults(lambda: apply(path, catalog, str(python)), "B009")
    assert [each.split(",")[0] for each in found] == ["made for Python 2.7", "made for 2.7"]


@pytest.mark.usefixtures("nvidia")
def test_an_environment_without_pip(bundle: Bundle, catalog: Catalog, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    target = str(tmp_path / "bare" / "bin" / "python")
    assert "No module named pip" in faults(lambda: apply(bundle.file, catalog, target), "X004")[-1]


@pytest.mark.usefixtures("nvidia")
def test_what_is_no_python(bundle: Bundle, catalog: Catalog) -> None:
    faults(lambda: apply(bundle.file, catalog, "/nowhere/python"), "B009")
    faults(lambda: apply(bundle.file, catalog, shutil.which("false") or "false"), "B009")


def test_an_unknown_bundle(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bundle"):
        build("big", catalog, tmp_path / "b.zip")
