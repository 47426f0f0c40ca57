"""`vox plugin disable` and `enable`, and the other ways to keep a plugin out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.plugin_site import MANIFEST, Site
from vox_core.install.environment import Environment
from vox_core.install.plan import Change, InstallPlan
from vox_core.install.requirements import Target

before, _, after = MANIFEST.partition("[capabilities]")
BARE = f"{before}[probe]{after.partition('[probe]')[2]}"
DISABLED = "disabled; to use it again: vox plugin enable mine"


@pytest.fixture(autouse=True)
def _nothing_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))


def test_a_disabled_plugin_is_blocked_until_it_is_enabled(
    vox, site: Site, listed, tmp_path
) -> None:
    assert vox("plugin", "disable", "mine").code == 0
    assert (listed()["mine"]["status"], listed()["mine"]["reason"]) == ("disabled", DISABLED)
    assert json.loads((tmp_path / "config/plugins.json").read_text()) == {"disabled": ["mine"]}
    told = json.loads(vox("backend", "explain", "--json").out)
    reasons = {verdict["id"]: verdict["reason"] for verdict in told["verdicts"]}
    assert reasons["mine"] == DISABLED
    assert DISABLED in vox("backend", "explain").out
    (examined,) = json.loads(vox("plugin", "doctor", "mine", "--json").out)
    assert "code" not in [check["name"] for check in examined["checks"]]
    assert vox("plugin", "enable", "mine").code == 0
    assert (listed()["mine"]["status"], listed()["mine"]["reason"]) == ("installed", "mine")
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
    assert listed()["mine"]["status"] == "disabled"
    assert listed()["mine"]["reason"] == "blocked by vox.toml"


@pytest.mark.parametrize(
    "command", ["plugin list", "plugin doctor mine", "backend list", "backend explain --json"]
)
def test_vox_toml_may_block_a_plugin_that_is_gone(
    vox, site: Site, tmp_path: Path, command: str
) -> None:
    """It is said, for it may be a spelling mistake; nothing else fails."""
    (tmp_path / "vox.toml").write_text('[plugin]\nblocked = ["min", "cpu", "zz"]\n')
    done = vox(*command.split())
    assert done.code == 0
    assert done.err.splitlines() == [
        "warning: [plugin] blocked in vox.toml: there is no plugin min (did you mean mine?)",
        "warning: [plugin] blocked in vox.toml: there is no plugin zz",
    ]


def test_a_list_that_cannot_be_written(vox, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_CONFIG", "/proc/vox")  # where nobody can make a folder, root or not
    done = vox("plugin", "disable", "mine")
    assert done.code == 2
    assert "next: make /proc/vox a folder that you can write to" in done.err
    assert "VOX_CONFIG" in done.err and "--out" not in done.err


def test_one_asked_for_by_name_says_how_to_enable_it(vox, site: Site) -> None:
    vox("plugin", "disable", "mine")
    done = vox("backend", "explain", "--backend", "mine")
    assert "next: vox plugin enable mine, or see" in done.out


def test_the_conformance_suite_runs_on_a_disabled_plugin(vox, site: Site) -> None:
    """One that declares nothing, so that no tensor library is needed to see it run."""
    site.add("bare", manifest=BARE)
    vox("plugin", "disable", "bare")
    path = os.pathsep.join((str(site.folder), *sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "vox_core.cli", "plugin", "check", "bare", "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # nothing has been shown of it
    told = json.loads(done.stdout)
    assert told["id"] == "bare"
    assert "passed" in {each["status"] for each in told["checks"]}


# --- removed, and installed again -----------------------------------------------------------------


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> InstallPlan:
    """To remove `mine`; nothing is really removed."""
    environment = Environment.here()
    made = InstallPlan("remove", environment, (Change("vox-x-mine", "0.1.0", None),))
    monkeypatch.setattr("vox_core.cli.plugin_install.plan_remove", lambda ids: made)
    monkeypatch.setattr("vox_core.cli.plugin_install.apply", lambda plan, report: None)
    return made


def disabled_in(folder: Path) -> list[str]:
    listed: list[str] = json.loads((folder / "config/plugins.json").read_text())["disabled"]
    return listed


def test_removing_it_forgets_that_it_was_disabled_and_says_so(
    vox, site: Site, plan: InstallPlan, tmp_path: Path
) -> None:
    vox("plugin", "disable", "cpu")
    vox("plugin", "disable", "mine")
    assert vox("plugin", "remove", "mine", "--dry-run").code == 0
    assert disabled_in(tmp_path) == ["cpu", "mine"]
    done = vox("plugin", "remove", "mine", "--yes")
    assert done.code == 0
    assert done.out.splitlines()[-1] == "mine: no longer marked as disabled"
    assert disabled_in(tmp_path) == ["cpu"]
    assert "forgotten" not in vox("plugin", "remove", "mine", "--yes").out


def test_json_of_a_removal_stays_one_object(vox, site: Site, plan: InstallPlan) -> None:
    vox("plugin", "disable", "mine")
    done = vox("plugin", "remove", "mine", "--yes", "--json")
    assert json.loads(done.out)["done"]
    assert "mine: no longer marked as disabled" in done.err


def test_an_id_that_another_package_still_has_stays_disabled(
    vox, site: Site, plan: InstallPlan, tmp_path: Path
) -> None:
    site.add("mine", distribution="vox-y-mine", package="vox_x_twin")
    vox("plugin", "disable", "mine")
    assert vox("plugin", "remove", "vox-x-mine", "--yes").code == 0
    assert disabled_in(tmp_path) == ["mine"]


def test_installing_one_that_is_disabled_says_so(
    vox, site: Site, monkeypatch: pytest.MonkeyPatch, plan: InstallPlan
) -> None:
    target = Target("mine", "vox-x-mine", "vox-x-mine==0.1.0")
    new = Change("vox-x-mine", None, "0.1.0")
    made = InstallPlan("install", plan.environment, (new,), (target,))
    monkeypatch.setattr("vox_core.cli.plugin_install.plan_install", lambda ids, **sources: made)
    vox("plugin", "disable", "mine")
    assert f"note: mine is {DISABLED}" in vox("plugin", "install", "mine", "--yes").err
    vox("plugin", "enable", "mine")
    assert "disabled" not in vox("plugin", "install", "mine", "--yes").err


def test_it_says_so_without_an_id_as_well(
    vox, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: InstallPlan
) -> None:
    """By the package, though nothing is to be installed."""
    made = InstallPlan("install", plan.environment, (), (Target(None, "vox-x-mine", "x==1"),))
    monkeypatch.setattr("vox_core.cli.plugin_install.plan_install", lambda ids, **sources: made)
    vox("plugin", "disable", "mine")
    done = vox("plugin", "install", "--from-pypi", "vox-x-mine==0.1.0")
    assert "nothing to install" in done.out
    assert f"note: mine is {DISABLED}" in done.err
