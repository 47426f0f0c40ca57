"""Each kind of Python environment is told by its files; vox installs there or says what will."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vox_core.errors import InputError
from vox_core.install.environment import Environment
from vox_core.install.uv import Uv


def made_up(prefix: Path, *files: str, base: Path | None = None) -> Environment:
    """An environment with these files in it; a virtual one if it has a base."""
    library = prefix / "lib/python3.11"
    for folder in (library / "site-packages", prefix / "bin"):
        folder.mkdir(parents=True)
    for file in files:
        (prefix / file).parent.mkdir(parents=True, exist_ok=True)
        (prefix / file).touch()
    return Environment(
        python=prefix / "bin/python",
        prefix=prefix,
        base_prefix=base or prefix,
        folders=(library / "site-packages", prefix / "bin"),
        standard_library=(base or prefix) / "lib/python3.11",
        path=(),
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


def refusal(environment: Environment, **change: list[str]) -> str:
    with pytest.raises(InputError) as raised:
        environment.require_changeable(**change)
    assert raised.value.code == "VOX-I001"
    return raised.value.remedy


def test_uv_tool(tmp_path: Path) -> None:
    environment = made_up(tmp_path / "vox-ml", "uv-receipt.toml", base=tmp_path)
    again = "uv makes this environment anew: repeat its whole `uv tool install`"
    assert refusal(environment, add=["vox-ml-cpu"]) == (f"{again}, with --with vox-ml-cpu")
    assert refusal(environment, remove=["vox-ml-old"]) == f"{again}, without --with vox-ml-old"


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


# --- uv, set up as pip is -------------------------------------------------------------------------


PIP_CONF = """
[global]
index-url = https://one/simple
extra-index-url =
    https://two/simple
    https://three/simple
timeout = 7
[install]
timeout = 9
no_index = yes
[download]
timeout = 11
"""


def settings(tmp_path: Path, text: str, **environ: str) -> Uv:
    (tmp_path / "pip.conf").write_text(text)
    given = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path), **environ}
    given |= {"XDG_CONFIG_DIRS": str(tmp_path)}
    return Uv(replace(Environment.here(), prefix=tmp_path), environ=given)


def test_settings_of_pip_become_settings_of_uv(tmp_path: Path) -> None:
    uv = settings(tmp_path, PIP_CONF, PIP_FIND_LINKS="/wheels https://links", PIP_CERT="/ca.pem")
    assert uv.options == ["--no-index"]
    assert {key: uv.environ[key] for key in uv.environ if key[:3] in ("UV_", "SSL")} == {
        "UV_DEFAULT_INDEX": "https://one/simple",
        "UV_INDEX": "https://two/simple https://three/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_HTTP_TIMEOUT": "9",
        "UV_FIND_LINKS": "/wheels,https://links",
        "SSL_CERT_FILE": "/ca.pem",
    }


def test_a_setting_of_uv_wins_and_what_uv_lacks_is_named(tmp_path: Path) -> None:
    text = "[global]\nindex-url = https://one\nprefer-binary = true\nquiet = 1\n"
    uv = settings(tmp_path, text, UV_DEFAULT_INDEX="https://mine", PIP_REQUIRE_HASHES="1")
    assert uv.environ["UV_DEFAULT_INDEX"] == "https://mine"
    assert uv.ignored == ("prefer-binary", "require-hashes")


def test_a_damaged_file_of_pip_is_named(tmp_path: Path) -> None:
    """It may name another index, which must not be replaced by PyPI without a word."""
    with pytest.raises(InputError, match="a configuration file of pip cannot be read"):
        settings(tmp_path, "no section = 1\n")


def test_the_configuration_of_the_current_folder_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloned repository decides neither about indexes nor about where packages go."""
    (tmp_path / "uv.toml").write_text('no-index = true\nfind-links = ["links"]\n')
    monkeypatch.chdir(tmp_path)
    command = settings(tmp_path, "").command("install")
    assert command[3] == "--no-config"
    (tmp_path / "home.toml").touch()
    named = settings(tmp_path, "", UV_CONFIG_FILE=str(tmp_path / "home.toml"))
    assert named.command("install")[3:5] == ["--config-file", str(tmp_path / "home.toml")]
    assert "UV_CONFIG_FILE" not in named.environ


def test_a_bundle_sees_its_own_folder_alone(tmp_path: Path) -> None:
    given = {
        "UV_INDEX_URL": "https://one",
        "UV_CACHE_DIR": "/cache",
        "PIP_INDEX_URL": "https://two",
    }
    uv = Uv(Environment.here(), only=tmp_path, environ=given)
    assert "--no-index" in uv.options and "--offline" in uv.options
    assert {key for key in uv.environ if key[:3] == "UV_"} == {"UV_CACHE_DIR"}
