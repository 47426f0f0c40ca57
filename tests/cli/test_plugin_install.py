"""What `vox plugin install`, `upgrade` and `remove` show, ask and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vox_core.cli.plugin_install import _line, _next
from vox_core.install.environment import Environment
from vox_core.install.plan import Change, InstallPlan

HERE = Environment(
    Path("python"), Path("/venv"), Path("/usr"), (Path("/venv/site"),), Path("/usr"), ()
)
OBSERVER = """
id = "{id}"
name = "{id}"
version = "0.1.0"
api = "{api}"
licence = "MIT"
provides.hooks = ["vox_event"]
"""
NEW = Change("vox-ml-cpu", None, "0.1.0", "file:///src", direct=True)
NEWER = Change("dep", "1.0", "2.0", "https://x/dep.whl", False, "0123456789abcdef" * 4, 2_500_000)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[InstallPlan]:
    """Plans that were carried out; the plan itself is made up."""
    plans: list[InstallPlan] = []

    def planned(*arguments: object, **sources: object) -> InstallPlan:
        return InstallPlan("install", HERE, (NEW, NEWER), notes=("look out",))

    def apply(plan: InstallPlan, report) -> None:
        report("a line of the installer's")
        plans.append(plan)

    for name in ("plan_install", "plan_upgrade", "plan_remove"):
        monkeypatch.setattr(f"vox_core.cli.plugin_install.{name}", planned)
    monkeypatch.setattr("vox_core.cli.plugin_install.apply", apply)
    return plans


def test_the_plan_is_shown_before_it_is_carried_out(vox, applied) -> None:
    done = vox("plugin", "install", "cpu", "--yes")
    assert done.out.splitlines() == [
        "install in /venv (a virtual environment)",
        "  vox-ml-cpu  0.1.0 (new)  from file:///src",
        "  dep  1.0 -> 2.0  2 MB",
        "  2 MB to download",
        "  built on this machine, which runs its code: vox-ml-cpu",
        "note: look out",
        "installed; next: vox backend list",
    ]
    assert done.err == "  a line of the installer's\n"
    assert (done.code, len(applied)) == (0, 1)
    verbose = vox("plugin", "install", "cpu", "--dry-run", "--verbose").out
    assert f"  dep  1.0 -> 2.0  2 MB  from https://x/dep.whl  sha256 {NEWER.sha256}\n" in verbose


def test_what_to_do_next(site) -> None:
    """An observer is no backend."""
    site.add("watcher", manifest=OBSERVER)

    def after(action: str, *names: str) -> str:
        changes = tuple(Change(name, None, "1.0", "", direct=True) for name in names)
        return _next(InstallPlan(action, HERE, changes))  # type: ignore[arg-type]

    assert after("install", "vox-x-watcher") == "vox plugin list"
    assert after("install", "vox-x-watcher", "vox-x-mine") == "vox backend list"
    assert after("install", "vox-x-mine", "numpy") == "vox backend list"
    assert after("remove", "vox-x-watcher") == "vox plugin list"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change("x", "1.0", "1.0", "file:///x-1.0-py3-none-any.whl", True), "its content differs"),
        (Change("x", "1.0", "1.0", "file:///src/x", True), "built anew"),
    ],
)
def test_why_the_same_version_comes_again(change: Change, said: str) -> None:
    assert _line(change).startswith(f"x  1.0 again ({said})")


@pytest.mark.parametrize(
    ("source", "direct", "built"),
    [
        ("https://x/x-1.0.tar.gz#sha256=0", False, True),
        ("https://x/x-1.0-py3-none-any.whl", False, False),
        ("", False, False),
        ("git+https://x/x@0", True, True),
    ],
)
def test_what_is_built(source: str, direct: bool, built: bool) -> None:
    assert Change("x", None, "1.0", source, direct).built == built


def test_sources_are_allowed_by_a_flag(vox, monkeypatch) -> None:
    asked: list[object] = []

    def planned(*arguments: object, **how: object) -> InstallPlan:
        asked.append(how["allow_source"])
        return InstallPlan("install", HERE, ())

    for name in ("plan_install", "plan_upgrade"):
        monkeypatch.setattr(f"vox_core.cli.plugin_install.{name}", planned)
    for command in ("install", "upgrade"):
        vox("plugin", command, "cpu", "--allow-source")
        vox("plugin", command, "cpu")
    assert asked == [True, False, True, False]


def test_a_dry_run_changes_nothing(vox, applied) -> None:
    done = vox("plugin", "install", "cpu", "--dry-run")
    assert (done.code, applied) == (0, []) and "0.1.0 (new)" in done.out


@pytest.mark.parametrize("command", ["install", "upgrade", "remove"])
def test_nobody_to_ask(vox, applied, command: str) -> None:
    done = vox("plugin", command, "cpu")
    assert (done.code, applied) == (2, [])
    assert "error[VOX-I012]" in done.err and "--yes" in done.err


@pytest.mark.parametrize(("answer", "code", "count"), [("y", 0, 1), ("n", 130, 0), ("", 130, 0)])
def test_a_person_is_asked(vox, applied, answer: str, code: int, count: int) -> None:
    done = vox("plugin", "install", "cpu", stdin=f"{answer}\n", terminal=True)
    assert (done.code, len(applied)) == (code, count)


def test_json_is_one_object_and_the_plan_is_on_stderr(vox, applied) -> None:
    done = vox("plugin", "install", "cpu", "--yes", "--json")
    told = json.loads(done.out)
    assert told["environment"] == {"prefix": "/venv", "kind": "venv"}
    assert [each["name"] for each in told["changes"]] == ["vox-ml-cpu", "dep"]
    assert told["done"] and "0.1.0 (new)" in done.err


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--from-path", "x", "--from-pypi", "y==1"],
        ["a", "b", "--from-wheel", "x"],
    ],
)
def test_it_is_said_once_what_to_install(vox, applied, flags: list[str]) -> None:
    done = vox("plugin", "install", *flags, "--yes")
    assert (done.code, applied) == (2, []) and "no plugin to install" in done.err
