"""`vox plugin list | info` and `vox backend explain`, on real packages.

What they say of broken plugins is in tests/core/test_isolation.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

from tests.core.plugin_site import MANIFEST, Site
from vox_core.cli import root
from vox_core.cli.plugin import COMMANDS, plugin

CATALOG = """
[[plugin]]
id = "{id}"
description = "Something more"
default-source = "pypi:vox-z-{id}==1.0"
distribution = "vox-z-{id}"
import-package = "vox_z_{id}"
licence = "MIT"
{more}
"""


def test_every_command_goes_by_its_name_in_the_table() -> None:
    ctx = click.Context(root)
    assert root.get_command(ctx, "plugin") is plugin
    assert [plugin.get_command(ctx, name).name for name in COMMANDS] == [*COMMANDS]  # type: ignore[union-attr]


# --- list, info -----------------------------------------------------------------------------------


def test_list_tells_installed_available_and_incompatible(
    vox, site: Site, listed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(sys.modules)
    more = {
        "other": "",
        "far": "platforms = \"sys_platform == 'plan9'\"",
        "gone": 'status="yanked"',
    }
    (tmp_path / "further.toml").write_text(
        "".join(CATALOG.format(id=id, more=text) for id, text in more.items())
    )
    (tmp_path / "vox.toml").write_text('[plugin]\ncatalogs = ["further.toml"]\n')
    site.add("needy", manifest=f'{MANIFEST}[requires]\ndistributions = ["vox-nothing>=2"]\n')
    site.add("alien", manifest=f'{MANIFEST}[requires]\nos = ["windows"]\n')
    told = listed()
    assert {id: told[id]["status"] for id in ("mine", "needy", "alien", *more)} == {
        "mine": "installed",
        "needy": "broken",
        "alien": "incompatible",
        "other": "available",
        "far": "incompatible",
        "gone": "incompatible",
    }
    assert all(each["reason"] for each in told.values())
    assert told["needy"]["reason"] == "distribution: vox-nothing>=2 is not installed"
    assert told["other"]["reason"] == "Something more: vox plugin install other"
    assert "plan9" in told["far"]["reason"]
    listed = [line.split() for line in vox("plugin", "list").out.splitlines()]
    assert ["mine", "0.1.0", "installed", "mine"] in listed
    assert not [
        name for name in set(sys.modules) - before if name.startswith(("vox_x_", "vox_cpu"))
    ]


def test_info_tells_what_is_known(vox, site: Site) -> None:
    done = vox("plugin", "info", "mine")
    assert done.code == 0
    said = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert done.out.startswith("mine is installed: mine\n")
    assert ["capabilities.families", "*"] in said
    facts = json.loads(vox("plugin", "info", "mine", "--json").out)
    assert facts["catalog"] is None
    assert facts["installed"][0]["manifest"]["capabilities"]["dtypes"] == ["fp32"]
    said = vox("plugin", "info", "runs").out
    assert "commands      runs\n" in said, "the names of its commands"
    assert "capabilities" not in said, "it is no backend"
    assert json.loads(vox("plugin", "info", "cpu", "--json").out)["catalog"]["licence"]


@pytest.mark.parametrize("command", ["info", "doctor", "enable", "disable"])
def test_an_unknown_id_is_an_error_with_the_nearest(vox, site: Site, command: str) -> None:
    done = vox("plugin", command, "minne")
    assert (done.code, done.out) == (2, "")
    assert "plugin 'minne' is unknown" in done.err
    assert "next: did you mean mine?" in done.err


def test_a_version_that_differs_from_the_packages_is_told(vox, site: Site, listed) -> None:
    site.add("skewed", manifest=MANIFEST.replace('"0.1.0"', '"0.2.0"'))
    differ = "its manifest says 0.2.0, vox-x-skewed is 0.1.0"
    told = listed()
    assert (told["skewed"]["status"], told["skewed"]["reason"]) == (
        "installed",
        f"skewed; {differ}",
    )
    assert told["mine"]["reason"] == "mine"
    said = vox("plugin", "info", "skewed").out.splitlines()
    assert ["warning", differ] in [line.split(maxsplit=1) for line in said]
    (facts,) = json.loads(vox("plugin", "info", "mine", "--json").out)["installed"]
    assert facts["warning"] is None


# --- backend explain ------------------------------------------------------------------------------


def test_explain_gives_what_a_run_records(vox, site: Site) -> None:
    told = json.loads(vox("backend", "explain", "--backend", "mine", "--json").out)
    assert sorted(told) == ["chosen", "hardware", "verdicts", "why"]
    assert told["chosen"] == "mine"
    assert "asked for (--backend mine)" in told["why"]
    assert told["why"] in vox("backend", "explain", "--backend", "mine").out


def test_explain_asks_as_the_operation_would(vox, site: Site, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "vox.toml").write_text('[merge]\nbackend = "cpu"\n[train]\nmethod = "dora"\n')
    told = json.loads(vox("backend", "explain", "--operation", "merge", "--json").out)
    assert "asked for (vox.toml cpu)" in told["why"]
    told = json.loads(vox("backend", "explain", "--json").out)
    reasons = {verdict["id"]: verdict["reason"] for verdict in told["verdicts"]}
    assert reasons["mine"] == "capability: method dora (has: lora)"
    monkeypatch.setenv("VOX_BACKEND", "mine")
    told = vox("backend", "explain", "--method", "lora").out
    assert "asked for (VOX_BACKEND mine)" in told


def test_explain_of_what_nobody_can_do(vox, site: Site, monkeypatch) -> None:
    asked = ("backend", "explain", "--quant", "nf4", "--dtype", "fp16")  # without a GPU
    monkeypatch.setenv("VOX_OVERRIDE_HARDWARE", "none")
    done = vox(*asked)
    assert done.code == 0
    *_, refusal, remedy = done.out.splitlines()
    assert (
        refusal
        == "no backend is chosen: no usable backend for `train` with quantisation nf4, dtype fp16"
    )
    assert remedy == "next: run with `--quant none`, or see `vox plugin doctor`"
    told = json.loads(vox(*asked, "--json").out)
    assert (told["chosen"], told["hardware"]) == (None, None)
    assert all(verdict["reason"] for verdict in told["verdicts"])
