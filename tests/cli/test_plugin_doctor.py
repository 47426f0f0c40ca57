"""`vox plugin doctor`: what it finds, whose fault it is, and how it exits."""

from __future__ import annotations

import json
import sys

import pytest

from tests.core.plugin_site import MANIFEST, WORKS, Site
from vox_core.host.discover import discover

DOCTOR = WORKS.replace(
    "class Backend:\n",
    "from vox_core.contract import Check\n"
    "class Backend:\n    @hookimpl\n    def vox_doctor(self):\n        {doctor}\n",
)


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


def test_doctor_of_everything_begins_with_the_environment(
    vox, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_API_KEY", "not for a bug report")
    examined = json.loads(vox("plugin", "doctor", "--json").out)
    assert [each["id"] for each in examined] == ["environment", *(each.id for each in discover())]
    details = {check["name"]: check["detail"] for check in examined[0]["checks"]}
    assert "VOX_CONFIG" in details
    assert details["VOX_API_KEY"] == "set"


@pytest.mark.usefixtures("others_disabled")
def test_a_catalog_that_cannot_be_read_is_a_failed_check(
    vox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_CATALOG", "/nonexistent")
    done = vox("plugin", "doctor")
    assert done.code == 1
    assert "FAIL  catalog" in done.out and "No such file or directory (/nonexistent)" in done.out
    assert "with problems: environment" in done.out


def test_a_probe_that_fails_and_hardware_that_is_absent_differ(vox, site: Site) -> None:
    (site.folder / "vox_x_mine/probe.py").write_text("raise SystemExit(3)")
    assert checks_of(vox, "mine")["hardware"]["detail"] == "its probe failed: exit 3"
    assert vox("plugin", "doctor", "mine").code == 1
    absent = 'print(\'{"present": false, "devices": [], "detail": "no card"}\')'
    (site.folder / "vox_x_mine/probe.py").write_text(absent)
    assert checks_of(vox, "mine")["hardware"]["detail"] == "no such hardware: no card"
    assert vox("plugin", "doctor", "mine").code == 1


# --- how it exits ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("others_disabled")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_it_exits_with_1_if_any_check_failed(vox, site: Site, flags: tuple[str, ...]) -> None:
    assert vox("plugin", "doctor", "mine", *flags).code == 0
    site.add("ill", DOCTOR.replace("{doctor}", 'yield Check("cable", False, "unplugged")'))
    assert vox("plugin", "doctor", "ill", *flags).code == 1
    done = vox("plugin", "doctor", *flags)
    assert (done.code, done.err) == (1, "")
    assert vox("plugin", "doctor", "mine", *flags).code == 0


def test_a_disabled_plugin_is_no_failure_and_doctor_says_how_to_enable_it(vox, site: Site) -> None:
    vox("plugin", "disable", "mine")
    done = vox("plugin", "doctor", "mine")
    assert done.code == 0
    assert "its own code was not run: disabled; to use it again: vox plugin enable mine" in done.out


# --- whose fault it is ----------------------------------------------------------------------------

AUTHORS = "upgrade it: vox plugin upgrade ill; if that does not help, report it "
HOMEPAGE = 'licence = "MIT"\nhomepage = "https://example.org/ill"'


def remedy_of(vox, name: str) -> str:
    check = checks_of(vox, "ill")[name]
    assert not check["ok"]
    return check["remedy"]


def test_code_that_fails_is_for_its_authors(vox, site: Site) -> None:
    site.add("ill", "import vox_x_nothing", manifest=MANIFEST.replace('licence = "MIT"', HOMEPAGE))
    assert remedy_of(vox, "code") == f"{AUTHORS}at https://example.org/ill"


@pytest.mark.parametrize("body", ["import os; os._exit(0)", "import os; os.abort()"])
def test_code_that_ends_the_process_is_for_its_authors(vox, site: Site, body: str) -> None:
    site.add("ill", body)
    assert remedy_of(vox, "code") == f"{AUTHORS}to the authors of vox-x-ill"


def test_a_probe_that_fails_is_for_its_authors(vox, site: Site) -> None:
    site.add("ill")
    (site.folder / "vox_x_ill/probe.py").write_text("raise SystemExit(3)")
    assert remedy_of(vox, "hardware") == f"{AUTHORS}to the authors of vox-x-ill"


def test_a_native_library_that_is_missing_is_named(vox, site: Site) -> None:
    site.add("ill", manifest=f'{MANIFEST}[requires]\nnative-libs = ["libvoxnone.so.9"]\n')
    assert remedy_of(vox, "hardware").startswith("install what brings libvoxnone.so.9")


def test_hardware_that_is_absent_is_to_be_looked_at(vox, site: Site) -> None:
    site.add("ill", manifest=f'{MANIFEST}[requires]\nhardware-tag = "nvidia"\n')
    absent = 'print(\'{"present": false, "devices": [], "detail": "no card"}\')'
    (site.folder / "vox_x_ill/probe.py").write_text(absent)
    assert remedy_of(vox, "hardware").startswith("if this machine has it: check that `nvidia-smi`")


def test_an_api_of_another_version_is_the_cause_and_an_upgrade_the_remedy(vox, site: Site) -> None:
    site.add("ill", api="7.0")
    assert "written for 7.0, this vox speaks 2.0" in checks_of(vox, "ill")["api"]["detail"]
    assert remedy_of(vox, "api") == "upgrade vox-ml"


def test_what_a_newer_manifest_says_is_the_cause_too(vox, site: Site) -> None:
    site.add("ill", manifest=f"{MANIFEST}[quantum]\nx = 1\n", api="7.0")
    check = checks_of(vox, "ill")["manifest"]
    assert check["detail"].startswith("a plugin's manifest is written for API 7.0, this vox speaks")
    assert check["remedy"] == "upgrade vox-ml"


@pytest.mark.parametrize(
    ("needs", "name", "remedy"),
    [
        ('os = ["windows"]', "platform", "install a plugin for this machine"),
        ('python = ">=99"', "python", "install vox and the plugin under a Python that it supports"),
        ('distributions = ["vox-none"]', "distribution", "install its requirements: vox plugin up"),
    ],
)
def test_what_is_not_met_has_its_own_remedy(
    vox, site: Site, needs: str, name: str, remedy: str
) -> None:
    site.add("ill", manifest=f"{MANIFEST}[requires]\n{needs}\n")
    assert remedy_of(vox, name).startswith(remedy)


def test_an_installation_that_is_damaged_is_installed_again(vox, site: Site) -> None:
    site.describe("vox-x-ill", "[vox_core.plugins]\nill = vox_x_gone:backend\n")
    assert remedy_of(vox, "manifest").startswith("install it again")


def test_a_package_without_its_manifest_is_for_its_authors(vox, site: Site) -> None:
    site.add("ill", manifest=None)
    assert remedy_of(vox, "manifest") == f"{AUTHORS}to the authors of vox-x-ill"


def test_versions_that_differ_are_a_finding_and_the_rest_is_still_looked_at(
    vox, site: Site
) -> None:
    site.add("ill", manifest=MANIFEST.replace('"0.1.0"', '"0.2.0"'))
    found = checks_of(vox, "ill")
    assert [name for name in found if not found[name]["ok"]] == ["version"]
    assert found["version"]["detail"] == "its manifest says 0.2.0, vox-x-ill is 0.1.0"
    for part in ("as its user: vox plugin upgrade ill", "as its author: give vox_plugin.toml"):
        assert part in found["version"]["remedy"]
    assert found["hardware"]["ok"] and found["code"]["ok"]


def test_a_library_that_the_package_requires_and_that_is_missing_is_named(vox, site: Site) -> None:
    site.add("ill")
    metadata = site.folder / "vox_x_ill-0.1.0.dist-info" / "METADATA"
    needs = "Requires-Dist: nothing-of-the-sort>=2\nRequires-Dist: never; python_version < '3'\n"
    metadata.write_text(metadata.read_text() + needs)
    assert checks_of(vox, "ill")["libraries"] == {
        "name": "libraries",
        "ok": False,
        "detail": "nothing-of-the-sort>=2 is not installed",
        "remedy": "install its requirements: vox plugin upgrade ill, or by hand",
    }
    assert vox("plugin", "doctor", "ill").code == 1
