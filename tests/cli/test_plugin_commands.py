"""Commands and names that plugins declare: shown without an import, imported when they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.core.plugin_site import Site
from tests.core.warm import here
from vox_core.cli.plugin_commands import installed_commands
from vox_core.errors import BackendError
from vox_core.host.load import load_plugin, provider

PLUGIN = """
id = "{id}"
name = "{id}"
version = "0.1.0"
api = "{api}"
licence = "MIT"
"""
COMMAND = (
    PLUGIN
    + """
[[commands]]
name = "{id}"
help = "Say hello."
entry = "vox_x_{id}:hello"
"""
)
HELLO = """
import click
@click.command()
def hello():
    click.echo("hello")
backend = None
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    return Site(folder)


def vox(*words: str) -> tuple[int, str, str]:
    done = here().run(words, os.environ, Path.cwd())
    return done.returncode, done.stdout, done.stderr


def test_help_shows_a_command_without_importing_its_plugin(site: Site) -> None:
    site.add("exploding", "raise RuntimeError('imported')", manifest=COMMAND)
    site.add("greeter", HELLO, manifest=COMMAND)
    code, out, err = vox("--help")
    assert (code, err) == (0, "")
    assert [word for word in ("exploding", "greeter") if f"{word}  " in out] == [
        "exploding",
        "greeter",
    ]
    assert vox("greeter") == (0, "hello\n", "")
    code, _, err = vox("exploding")
    assert code == 2
    assert "plugin 'exploding' is installed but broken" in err
    assert "RuntimeError: imported" in err


def test_a_command_is_added_to_a_group_of_vox(site: Site) -> None:
    manifest = COMMAND.replace('name = "{id}"\nhelp', 'name = "data {id}"\nhelp')
    site.add("census", HELLO, manifest=manifest)
    assert "census" not in vox("--help")[1]
    assert "census" in vox("data", "--help")[1]
    assert vox("data", "census") == (0, "hello\n", "")


def test_the_core_wins_and_of_two_plugins_the_user_decides(site: Site) -> None:
    taken = COMMAND.replace('name = "{id}"\nhelp', 'name = "train"\nhelp')
    twin = COMMAND.replace('name = "{id}"\nhelp', 'name = "twin"\nhelp')
    site.add("greedy", HELLO, manifest=taken)
    site.add("one", HELLO, manifest=twin)
    two = HELLO.replace('"hello"', '"second"')
    site.add("two", two, manifest=twin)
    assert "Declared by plugins one and two." in vox("--help")[1]
    code, _, err = vox("twin")
    assert code == 2
    assert '[plugin.provider] "commands.twin" = "one"' in err
    _, out, _ = vox("plugin", "doctor", "one")
    assert "two plugins provide 'twin' (commands): one and two" in out
    assert '[plugin.provider] "commands.twin" = "one" or "two"' in out
    (Path.cwd() / "vox.toml").write_text('[plugin.provider]\n"commands.twin" = "two"\n')
    assert vox("twin") == (0, "second\n", "")
    assert "--model" in vox("train", "--help")[1]
    _, out, _ = vox("plugin", "doctor", "greedy")
    assert "vox train: it is a command of vox itself" in out
    assert vox("plugin", "doctor", "one")[0] == vox("plugin", "doctor", "two")[0] == 0


def test_a_command_below_another_plugins_command_is_a_finding(site: Site) -> None:
    site.add("outer", HELLO, manifest=COMMAND)
    inner = COMMAND.replace('name = "{id}"\nhelp', 'name = "outer list"\nhelp')
    site.add("inner", HELLO, manifest=inner)
    assert vox("outer") == (0, "hello\n", "")
    _, out, _ = vox("plugin", "doctor", "inner")
    assert "vox outer list: vox outer is a command, and takes none below it" in out
    assert vox("plugin", "doctor", "outer")[0] == 0


def test_a_distribution_hides_a_later_one_of_its_name(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("new", HELLO, manifest=COMMAND, distribution="px")
    older = Site(tmp_path / "older")
    older.add("old", HELLO, manifest=COMMAND, distribution="px")
    monkeypatch.setattr(sys, "path", [str(site.folder), str(older.folder), *sys.path])
    assert {each.plugin for each in installed_commands()} & {"new", "old"} == {"new"}


def test_the_doctor_imports_the_entry_of_a_command(site: Site) -> None:
    site.add("absent", HELLO, manifest=COMMAND.replace(":hello", ":bye"))
    code, out, _ = vox("plugin", "doctor", "absent")
    assert code == 1
    assert "vox_x_absent:bye: AttributeError" in out
    assert vox("--version")[0] == 0


def test_the_command_of_a_plugin_that_is_not_installed(site: Site) -> None:
    catalog = site.folder / "catalog.toml"
    catalog.write_text(
        '[[plugin]]\nid = "oracle"\ndescription = "o"\n'
        'provides = { commands = ["oracle", "data oracle", "seer ask"] }\n'
        'default-source = "local:p"\n'
        'distribution = "vox-ml-oracle"\nimport-package = "vox_oracle"\nlicence = "MIT"\n'
    )
    (Path.cwd() / "vox.toml").write_text(f'[plugin]\ncatalogs = ["{catalog}"]\n')
    for words in (("oracle",), ("data", "oracle"), ("seer",)):
        code, _, err = vox(*words)
        assert code == 2
        assert f"`vox {' '.join(words)}` comes with plugin 'oracle'" in err
        assert "vox plugin install oracle" in err


def test_a_disabled_plugins_command(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("greeter", HELLO, manifest=COMMAND)
    assert vox("plugin", "disable", "greeter")[0] == 0
    code, _, err = vox("greeter")
    assert (code, "vox plugin enable greeter" in err) == (2, True)
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "greeter")
    assert "Say hello" not in vox("--help")[1]


def test_a_manifest_that_cannot_be_read_costs_others_nothing(site: Site) -> None:
    site.add("good", HELLO, manifest=COMMAND)
    site.add("bad", HELLO, manifest="commands = [")
    site.add("odd", HELLO, manifest=COMMAND.replace('help = "Say hello."', "help = 5"))
    assert {each.plugin for each in installed_commands()} & {"good", "bad", "odd"} == {"good"}


PROVIDES = PLUGIN + '[provides]\nobjectives = ["mine"]\n'


def test_the_provider_of_a_name(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("first", HELLO, manifest=PROVIDES)
    assert provider("objectives", "mine").id == "first"
    with pytest.raises(BackendError) as missing:
        provider("objectives", "other")
    assert missing.value.code == "VOX-B013"
    site.add("second", HELLO, manifest=PROVIDES)
    with pytest.raises(BackendError) as two:
        provider("objectives", "mine")
    assert (two.value.code, two.value.found) == ("VOX-B014", "first and second")
    (Path.cwd() / "vox.toml").write_text('[plugin.provider]\n"objectives.mine" = "second"\n')
    assert provider("objectives", "mine").id == "second"
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "second")
    assert provider("objectives", "mine").id == "first"


@pytest.mark.parametrize("api", ["1.0", "99.0"])
def test_a_plugin_for_another_vox_is_not_imported(site: Site, api: str) -> None:
    site.add("other", "raise SystemExit", manifest=PROVIDES.replace("{api}", api))
    with pytest.raises(BackendError) as caught:
        load_plugin(provider("objectives", "mine"))
    assert caught.value.code == "VOX-B004"
    assert f"api: written for {api}" in str(caught.value.found)


def test_a_broken_plugin_may_be_the_one_that_provides_a_name(site: Site) -> None:
    site.add("ill", HELLO, manifest="id = 3\n")
    with pytest.raises(BackendError) as missing:
        provider("objectives", "zzzzzz")
    assert "'ill' is installed but broken" in str(missing.value.found)
    assert missing.value.remedy == "vox plugin doctor ill"


def test_an_unknown_extension_point_is_a_note_of_the_doctor(site: Site) -> None:
    site.add("other", HELLO, manifest=PLUGIN + '[provides]\nscorers = ["f1"]\n')
    code, out, _ = vox("plugin", "doctor", "other")
    assert code == 0
    assert "scorers: not extension points of the core" in out


HOOKS = """
import sys
from vox_core.hookspecs import hookimpl
backend = sys.modules[__name__]
@hookimpl
def vox_event(event):
    pass
@hookimpl
def vox_objective(spec):
    pass
"""


@pytest.mark.parametrize(
    ("provides", "said"),
    [
        ('hooks = ["vox_event"]\nobjectives = ["mine"]', ""),
        (
            'hooks = ["vox_evnt"]\nobjectives = ["mine"]',
            "the manifest needs vox_evnt (did you mean vox_event?), marked with @hookimpl; "
            "vox_event: never called, as "
            "the manifest does not declare it",
        ),
        (
            'hooks = ["vox_event"]\nobjectives = ["mine"]\nrewards = ["mine"]',
            "the manifest needs vox_reward, marked with @hookimpl",
        ),
        ('hooks = ["vox_event"]\nobjectives = ["mine"]\nrewards = []', ""),
    ],
)
def test_the_doctor_compares_hooks_with_the_manifest(site: Site, provides: str, said: str) -> None:
    site.add("mine", HOOKS, manifest=f"{PLUGIN}[provides]\n{provides}\n")
    code, out, _ = vox("plugin", "doctor", "mine")
    assert (code, "FAIL  hooks" in out, said in out) == (bool(said), bool(said), True)


def test_the_doctor_goes_on_after_a_fault(site: Site) -> None:
    commands = "".join(
        f'[[commands]]\nname = "{name}"\nhelp = "h"\nentry = "vox_x_ill:{name}"\n'
        for name in ("first", "second")
    )
    doctor = "@hookimpl\ndef vox_doctor():\n    raise ValueError('sick')\n"
    site.add(
        "ill", HOOKS + doctor, manifest=f'{PLUGIN}[provides]\nhooks = ["vox_event"]\n{commands}'
    )
    code, out, _ = vox("plugin", "doctor", "ill")
    assert code == 1
    for fault in ("vox_objective: never called", "vox first:", "vox second:", "ValueError: sick"):
        assert fault in out


def test_the_doctor_knows_optional_hooks_and_a_backend_that_is_not_declared(site: Site) -> None:
    newer = "@hookimpl(optionalhook=True)\ndef vox_newer(x):\n    pass\n"
    provides = '[provides]\nhooks = ["vox_event"]\nobjectives = ["mine"]\n'
    site.add("optional", HOOKS + newer, manifest=PLUGIN + provides)
    assert vox("plugin", "doctor", "optional")[0] == 0
    backend = "@hookimpl\ndef vox_load(job, context):\n    pass\n"
    site.add("undeclared", HOOKS + backend, manifest=PLUGIN + provides)
    code, out, _ = vox("plugin", "doctor", "undeclared")
    assert code == 1
    assert "vox_load: never called, as the manifest does not declare it" in out


def test_the_doctor_finds_a_name_that_two_plugins_provide(site: Site) -> None:
    both = f'{PLUGIN}[provides]\nobjectives = ["mine"]\nhooks = ["vox_event"]\n'
    for id in ("first", "second"):
        site.add(id, HOOKS, manifest=both)
    code, out, _ = vox("plugin", "doctor", "first")
    assert code == 1
    assert "two plugins provide 'mine' (objectives): first and second" in out
    assert '[plugin.provider] "objectives.mine" = "first" or "second"' in out
    assert vox("plugin", "disable", "second")[0] == 0
    assert vox("plugin", "doctor", "first")[0] == 0


def test_rows_of_another_type_are_the_plugins_fault(site: Site) -> None:
    body = HOOKS + "@hookimpl\ndef vox_open_rows(reference):\n    return [{}]\n"
    provides = '[provides]\nrow-sources = {{ suffixes = [".mine"] }}\n'
    site.add("mine", body, manifest=PLUGIN + provides)
    Path("rows.mine").write_text("x")
    code, _, err = vox("data", "check", "rows.mine")
    assert code == 1
    assert "plugin 'mine' gave a wrong result from vox_open_rows" in err
    assert "found:    an object of type list" in err
    assert "expected: RowStream" in err


MINE = PLUGIN + '[provides]\nrow-sources = {{ suffixes = [".mine"] }}\n'
ROWS = """
from vox_core.contract import RowStream
from vox_core.hookspecs import hookimpl
@hookimpl
def vox_open_rows(reference):
    return RowStream([{rows}])
import sys
backend = sys.modules[__name__]
"""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("('a', 'b')", "TypeError: a row is a tuple, expected a mapping"),
        ("{'text': object()}", "found Object of type object is not JSON serializable"),
    ],
)
def test_rows_that_are_none_are_no_bug_of_vox(site: Site, row: str, said: str) -> None:
    site.add("mine", ROWS.replace("{rows}", row), manifest=MINE)
    Path("rows.mine").write_text("x")
    code, out, err = vox("data", "check", "rows.mine")
    assert code != 0
    assert "VOX-X002" not in err
    assert said in out + err


def test_rows_of_another_version_of_a_plugin_are_read_again(site: Site) -> None:
    site.add("mine", ROWS.replace("{rows}", "{'text': 'a'}"), manifest=MINE)
    Path("rows.mine").write_text("x")
    assert vox("data", "check", "rows.mine")[0] == 0
    (site.folder / "vox_x_mine/__init__.py").write_text(ROWS.replace("{rows}", "{'answers': 'a'}"))
    assert vox("data", "check", "rows.mine")[0] == 0
    manifest = site.folder / "vox_x_mine/vox_plugin.toml"
    manifest.write_text(manifest.read_text().replace("0.1.0", "0.2.0"))
    assert vox("data", "check", "rows.mine")[0] == 2


def test_what_a_command_raises_is_its_plugins_fault(site: Site) -> None:
    failing = HELLO.replace('click.echo("hello")', 'open("absent")')
    site.add("greeter", failing, manifest=COMMAND)
    line = 1 + failing[: failing.index("open(")].count("\n")
    code, out, err = vox("greeter")
    assert (code, out) == (1, "")
    assert "error[VOX-X001]: plugin 'greeter' failed\n" in err
    assert f"'absent' ({site.folder}/vox_x_greeter/__init__.py, line {line})\n" in err


def test_an_import_that_fails_is_said_with_its_line(site: Site) -> None:
    site.add("greeter", "\nimport absent\n" + HELLO, manifest=COMMAND)
    place = f"({site.folder}/vox_x_greeter/__init__.py, line 2)"
    assert place in vox("greeter")[2]
    assert place in vox("plugin", "doctor", "greeter")[1]


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("vox_rewards(name)", "expected a hook of vox_core.hookspecs (did you mean vox_reward?)"),
        ("vox_reward(reward)", "vox_reward(name)"),
    ],
)
def test_the_doctor_says_which_hook_was_meant(site: Site, hook: str, said: str) -> None:
    body = f"{HOOKS}@hookimpl\ndef {hook}:\n    return None\n"
    site.add("mine", body, manifest=PLUGIN + '[provides]\nrewards = ["mine"]\n')
    assert said in vox("plugin", "doctor", "mine")[1]


def test_an_extension_point_that_is_misspelt_is_named_with_the_nearest(site: Site) -> None:
    site.add("mine", HOOKS, manifest=PLUGIN + '[provides]\nreward = ["mine"]\n')
    assert (
        "reward (did you mean rewards?): not extension points"
        in (vox("plugin", "doctor", "mine")[1])
    )


@pytest.mark.parametrize(
    ("words", "hook", "expected"),
    [
        (["--emit", "mine"], "vox_write_job(kind)", "str"),
        (["--launcher", "mine", "--processes", "2"], "vox_launch(job)", "LaunchResult"),
    ],
)
def test_what_starts_a_run_elsewhere_has_its_type(site: Site, words, hook, expected) -> None:
    provides = '[provides]\nlaunchers = ["mine"]\njob-formats = ["mine"]\n'
    body = f"{HOOKS}@hookimpl\ndef {hook}:\n    return 0\n"
    site.add("mine", body, manifest=PLUGIN + provides)
    code, out, err = vox("train", "--data", "rows.jsonl", *words)
    assert (code, out) == (1, "")
    assert f"plugin 'mine' gave a wrong result from {hook.partition('(')[0]}" in err
    assert f"expected: {expected}\n" in err


def test_needs_that_no_objective_can_have_are_refused(site: Site) -> None:
    body = (
        HOOKS
        + """
from vox_core.contract import Objective
class Mine(Objective):
    needs = frozenset({"references"})
    def weigh(self, groups, totals): ...
@hookimpl
def vox_objective(spec):
    return Mine()
"""
    )
    site.add("mine", body, manifest=PLUGIN + '[provides]\nobjectives = ["mine"]\n')
    code, _, err = vox("train", "--data", "rows.jsonl", "--objective", "mine")
    assert code == 2
    assert "needs of 'mine': references" in err
