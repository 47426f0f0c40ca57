"""`vox plugin list | info | doctor | enable | disable` and `vox backend explain`, on real packages.

What they say of broken plugins is in tests/core/test_isolation.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tests.core.plugin_site import MANIFEST, WORKS, Site
from vox_core.cli import root
from vox_core.cli.plugin import COMMANDS, plugin
from vox_core.host.discover import discover

DOCTOR = WORKS.replace(
    "class Backend:\n",
    "from vox_core.contract import Check\n"
    "class Backend:\n    @hookimpl\n    def vox_doctor(self):\n        {doctor}\n",
)


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _clean_place: None) -> None:
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A folder of plugins on the path; `mine` is in it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made = Site(folder)
    made.add("mine", manifest=MANIFEST.replace("1000000", "0"))
    return made


@pytest.fixture
def listed(vox) -> Callable[[], dict[str, dict[str, str]]]:
    """`vox plugin list --json`, by id."""
    return lambda: {each["id"]: each for each in json.loads(vox("plugin", "list", "--json").out)}


CATALOG = """
[[plugin]]
id = "{id}"
description = "Something more"
payload-kind = "code"
extension-points = ["MlBackend"]
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
    assert "mine   0.1.0  installed     mine" in vox("plugin", "list").out.splitlines()
    assert not [
        name for name in set(sys.modules) - before if name.startswith(("vox_x_", "vox_cpu"))
    ]


def test_info_tells_what_is_known(vox, site: Site) -> None:
    done = vox("plugin", "info", "mine")
    assert done.code == 0
    for line in ("distribution  vox-x-mine", "  capabilities.families       *"):
        assert line in done.out.splitlines()
    facts = json.loads(vox("plugin", "info", "mine", "--json").out)
    assert facts["catalog"] is None
    assert facts["installed"][0]["manifest"]["capabilities"]["dtypes"] == ["fp32"]
    assert json.loads(vox("plugin", "info", "cpu", "--json").out)["catalog"]["licence"]


@pytest.mark.parametrize("command", ["info", "doctor", "enable", "disable"])
def test_an_unknown_id_is_an_error_with_the_nearest(vox, site: Site, command: str) -> None:
    done = vox("plugin", command, "minne")
    assert (done.code, done.out) == (2, "")
    assert "plugin 'minne' is unknown" in done.err
    assert "next: did you mean mine?" in done.err


# --- doctor ---------------------------------------------------------------------------------------


def checks_of(vox, id: str, *flags: object) -> dict[str, dict[str, str]]:
    (examined,) = json.loads(vox("plugin", "doctor", id, "--json", *flags).out)
    return {check["name"]: check for check in examined["checks"]}


def test_doctor_asks_the_plugin_itself(vox, site: Site) -> None:
    check = 'yield Check("cable", False, "unplugged", "plug it in")'
    site.add("ill", DOCTOR.replace("{doctor}", check))
    found = checks_of(vox, "ill")
    assert [name for name in found if found[name]["ok"]] == [
        *("manifest", "api", "platform", "python", "distribution", "hardware", "code")
    ]
    assert found["cable"] == {
        "name": "cable", "ok": False, "detail": "unplugged", "remedy": "plug it in"
    }  # fmt: skip
    shown = vox("plugin", "doctor", "ill").out
    assert "FAIL  cable         unplugged" in shown
    assert "plug it in" in shown
    assert "vox_x_ill" not in sys.modules


CRASHES = {
    "raise SystemExit(0)": ("vox_doctor", "SystemExit: 0"),
    "return [7]": ("vox_doctor", "TypeError: vox_doctor gave int, expected Check"),
    "import os; os._exit(0)": ("code", "its code ended the process"),
    "import os; os.kill(os.getpid(), 11)": ("code", "its code was ended by SIGSEGV"),
    "import time; time.sleep(60)": ("code", "its code did not end in 3 s"),
}


@pytest.mark.parametrize("body", CRASHES)
def test_a_doctor_that_crashes_costs_a_line(vox, site: Site, body: str) -> None:
    site.add("ill", DOCTOR.replace("{doctor}", body))
    name, detail = CRASHES[body]
    found = checks_of(vox, "ill", "--timeout", 3)[name]
    assert (found["ok"], found["detail"]) == (False, detail)


def test_doctor_of_everything_begins_with_the_environment(vox, site: Site) -> None:
    examined = json.loads(vox("plugin", "doctor", "--json").out)
    assert [each["id"] for each in examined] == ["environment", *(each.id for each in discover())]
    assert "VOX_CONFIG" in [check["name"] for check in examined[0]["checks"]]


def test_a_probe_that_fails_and_hardware_that_is_absent_differ(vox, site: Site) -> None:
    (site.folder / "vox_x_mine/probe.py").write_text("raise SystemExit(3)")
    assert checks_of(vox, "mine")["hardware"]["detail"] == "its probe failed: exit 3"
    absent = 'print(\'{"present": false, "devices": [], "detail": "no card"}\')'
    (site.folder / "vox_x_mine/probe.py").write_text(absent)
    assert checks_of(vox, "mine")["hardware"]["detail"] == "no such hardware: no card"


# --- enable, disable, blocked ---------------------------------------------------------------------


def test_a_disabled_plugin_is_blocked_until_it_is_enabled(
    vox, site: Site, listed, tmp_path
) -> None:
    assert vox("plugin", "disable", "mine").code == 0
    assert listed()["mine"]["reason"] == "blocked by `vox plugin disable`"
    assert json.loads((tmp_path / "config/plugins.json").read_text()) == {"disabled": ["mine"]}
    told = json.loads(vox("backend", "explain", "--json").out)
    reasons = {verdict["id"]: verdict["reason"] for verdict in told["verdicts"]}
    assert reasons["mine"] == "blocked by `vox plugin disable`"
    assert "code" not in checks_of(vox, "mine")
    assert vox("plugin", "enable", "mine").code == 0
    assert listed()["mine"]["reason"] == "mine"
    assert vox("plugin", "enable", "mine").out == "mine is not disabled; nothing was changed\n"


def test_a_disabled_plugin_that_is_gone_is_no_error(vox, site: Site, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/plugins.json").write_text('{"disabled": ["gone"]}')
    assert vox("plugin", "list").code == 0
    assert vox("plugin", "enable", "gone").code == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"disabled": [1]}', "{}"])
def test_a_damaged_list_says_which_file(vox, tmp_path: Path, text: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/plugins.json").write_text(text)
    done = vox("plugin", "list")
    assert (done.code, "VOX-C008" in done.err, "plugins.json" in done.err) == (2, True, True)


def test_vox_toml_blocks(vox, site: Site, listed, tmp_path: Path) -> None:
    (tmp_path / "vox.toml").write_text('[plugin]\nblocked = ["mine", "cpu"]\n')
    assert listed()["mine"]["reason"] == "blocked by vox.toml"
    (tmp_path / "vox.toml").write_text('[plugin]\nblocked = ["min"]\n')
    done = vox("plugin", "list")
    assert done.code == 2
    assert "[plugin] blocked in vox.toml names plugins that vox does not know" in done.err
    assert "min; did you mean mine?" in done.err


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


def test_explain_of_what_nobody_can_do(vox, site: Site) -> None:
    done = vox("backend", "explain", "--quant", "nf4")
    assert done.code == 0
    *_, refusal, remedy = done.out.splitlines()
    assert refusal == "none is chosen: no usable backend for `train` with quantisation nf4"
    assert remedy == "next: run with `--quant none`, or see `vox plugin doctor`"
    told = json.loads(vox("backend", "explain", "--quant", "nf4", "--json").out)
    assert (told["chosen"], told["hardware"]) == (None, None)
    assert all(verdict["reason"] for verdict in told["verdicts"])
