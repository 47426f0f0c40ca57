"""Each kind of Python environment is told by its files; vox installs there or says what will."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vox_core.errors import InputError
from vox_core.host.environment import Environment

RECEIPT = """
[tool]
requirements = [
    { name = "vox-ml", specifier = ">=0.1" },
    { name = "vox-ml-old", directory = "/src/old" },
    { name = "rich", extras = ["jupyter"], specifier = ">=13" },
    { name = "other", git = "https://example.org/o?rev=1" },
]
"""


def made_up(prefix: Path, *files: str, base: Path | None = None) -> Environment:
    """An environment with these files in it; a virtual one if it has a base."""
    library = prefix / "lib/python3.11"
    for folder in (library / "site-packages", prefix / "bin"):
        folder.mkdir(parents=True)
    for file in files:
        (prefix / file).parent.mkdir(parents=True, exist_ok=True)
        (prefix / file).write_text(RECEIPT if file == "uv-receipt.toml" else "")
    return Environment(
        python=prefix / "bin/python",
        prefix=prefix,
        base_prefix=base or prefix,
        folders=(library / "site-packages", prefix / "bin"),
        standard_library=(base or prefix) / "lib/python3.11",
        has_pip=True,
        uv="/usr/bin/uv",
    )


MARKER = "lib/python3.11/EXTERNALLY-MANAGED"


@pytest.mark.parametrize(
    ("kind", "files", "virtual"),
    [
        ("venv", ["pyvenv.cfg"], True),
        ("venv", ["pyvenv.cfg", "conda-meta/history"], True),
        ("uv-tool", ["pyvenv.cfg", "uv-receipt.toml"], True),
        ("pipx", ["pyvenv.cfg", "pipx_metadata.json"], True),
        ("conda", ["conda-meta/history"], False),
        ("externally-managed", [MARKER], False),
        ("externally-managed", [MARKER, "conda-meta/history"], False),
        ("system", [], False),
    ],
)
def test_kinds(tmp_path: Path, kind: str, files: list[str], virtual: bool) -> None:
    base = tmp_path / "base" if virtual else None
    assert made_up(tmp_path / "here", *files, base=base).kind == kind


def test_a_venv_of_a_managed_python_is_a_venv(tmp_path: Path) -> None:
    base = made_up(tmp_path / "usr", MARKER).prefix
    made_up(tmp_path / "venv", base=base).require_changeable(add=["x"])


@pytest.mark.parametrize("files", [[], ["conda-meta/history"]])
def test_pip_if_it_is_there_else_uv_else_words(tmp_path: Path, files: list[str]) -> None:
    environment = made_up(tmp_path / "here", *files)
    environment.require_changeable(add=["x"])
    assert environment.installer("install")[:5] == [
        str(environment.python), "-P", "-m", "pip", "install",
    ]  # fmt: skip
    assert "--yes" in environment.installer("uninstall")
    by_uv = replace(environment, has_pip=False)
    assert by_uv.installer("install") == [
        "/usr/bin/uv", "pip", "install", "--python", str(environment.python),
    ]  # fmt: skip
    with pytest.raises(InputError, match="no installer") as raised:
        replace(by_uv, uv=None).installer("install")
    assert "-m ensurepip" in raised.value.remedy


def refusal(environment: Environment, **change: list[str]) -> str:
    with pytest.raises(InputError) as raised:
        environment.require_changeable(**change)
    assert raised.value.code == "VOX-I001"
    return raised.value.remedy


def test_uv_tool_is_told_with_all_that_it_has(tmp_path: Path) -> None:
    environment = made_up(tmp_path / "vox-ml", "uv-receipt.toml", base=tmp_path)
    kept = "--with 'rich[jupyter]>=13' --with 'other @ git+https://example.org/o?rev=1'"
    assert refusal(environment, add=["vox-ml-cpu"]) == (
        f"run: uv tool install 'vox-ml>=0.1' --with /src/old {kept} --with vox-ml-cpu"
    )
    assert refusal(environment, remove=["vox-ml-old"]) == (
        f"run: uv tool install 'vox-ml>=0.1' {kept}"
    )


def test_pipx(tmp_path: Path) -> None:
    environment = made_up(tmp_path / "vox-ml", "pipx_metadata.json", base=tmp_path)
    assert refusal(environment, add=["vox-ml-cpu", "/src/x"]) == (
        "run: pipx inject vox-ml vox-ml-cpu /src/x"
    )
    assert refusal(environment, remove=["vox-ml-cpu"]) == "run: pipx uninject vox-ml vox-ml-cpu"


def test_a_managed_python_is_never_overridden(tmp_path: Path) -> None:
    said = refusal(made_up(tmp_path / "usr", MARKER), add=["vox-ml-cpu"])
    assert "-m venv .venv && .venv/bin/python -m pip install vox-ml vox-ml-cpu" in said
    assert "--break-system-packages" not in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_prefix(tmp_path: Path) -> None:
    environment = made_up(tmp_path / "here")
    environment.site_packages.chmod(0o555)
    assert "-m venv .venv" in refusal(environment, add=["vox-ml-cpu"])


def test_a_prefix_that_may_not_be_written(tmp_path: Path, monkeypatch) -> None:
    environment = made_up(tmp_path / "here")
    monkeypatch.setattr(os, "access", lambda path, mode: path != environment.site_packages)
    assert "-m venv .venv" in refusal(environment, add=["vox-ml-cpu"])


def test_this_one() -> None:
    environment = Environment.here()
    assert environment.site_packages.is_dir() and environment.python.exists()
    assert environment.prefix == Path(sys.prefix)
