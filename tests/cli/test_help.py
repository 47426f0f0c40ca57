"""The table of commands, and help that costs nothing.

That `vox --help` imports nothing heavy is held in tests/architecture/test_startup.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

import click
import pytest

from vox_core.cli import COMMANDS, root
from vox_core.cli.lazy import Group
from vox_core.cli.train import TRAIN_SECTIONS, train
from vox_core.config import TrainSettings

PATHS = [
    "quickstart",
    "plan",
    "train",
    "data extract python",
    "data extract markdown",
    "data stats",
    "data preview",
    "merge",
    "export",
    "push",
    "chat",
    "data check",
    "eval",
    "generate",
    "serve",
    "tinker serve",
    "runs list",
    "runs show",
    "runs watch",
    "runs compare",
    "runs plot",
    "model list",
    "model new",
    "model pull",
    "plugin list",
    "plugin info",
    "plugin install",
    "plugin upgrade",
    "plugin remove",
    "data mix",
    "data generate",
    "promote",
    "registry list",
    "registry show",
    "registry rollback",
    "plugin doctor",
    "plugin enable",
    "plugin disable",
    "bundle lock",
    "plugin new",
    "plugin check",
    "backend list",
    "backend explain",
    "bundle list",
    "bundle build",
    "bundle verify",
    "bundle install",
    "config schema",
    "config show",
]


def leaves(group: click.Group, prefix: str = "") -> list[str]:
    """Every command that does something, by its path."""
    found = []
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        child, path = group.get_command(ctx, name), f"{prefix}{name}"
        found += leaves(child, f"{path} ") if isinstance(child, click.Group) else [path]
    return found


def test_these_are_the_commands() -> None:
    assert sorted(leaves(root)) == sorted(PATHS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_goes_by_the_name_in_the_table(name: str) -> None:
    command = root.get_command(click.Context(root), name)
    assert command is not None
    assert command.name == name


@pytest.mark.parametrize("path", PATHS)
def test_each_command_has_help_and_takes_debug(vox, path: str) -> None:
    done = vox(*path.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: vox {path}")
    assert "--debug" in done.out
    assert vox(*path.split(), "-h") == done


def test_help_lists_commands_without_importing_them() -> None:
    script = (
        "import sys; from vox_core.cli import failures, root; failures.run(root, ['--help']);"
        "print(*sorted(m for m in sys.modules if m.startswith('vox_core.cli.')))"
    )
    out = subprocess.check_output([sys.executable, "-c", script], text=True)
    *help_lines, imported = out.splitlines()
    names = ("failures", "lazy", "plugin_commands")
    assert imported.split() == [f"vox_core.cli.{name}" for name in names]
    assert [name for name in COMMANDS if f"  {name} " in "\n".join(help_lines)] == [*COMMANDS]


def test_without_a_command_there_is_help_and_exit_2(vox) -> None:
    done = vox()
    assert (done.code, done.out) == (2, "")
    assert "Usage: vox" in done.err


@pytest.mark.parametrize("group", ["model", "backend", "config"])
def test_a_group_without_a_command_shows_its_help(vox, group: str) -> None:
    done = vox(group)
    assert done.code == 2
    assert f"Usage: vox {group}" in done.err


def test_h_is_help(vox) -> None:
    assert vox("-h") == vox("--help")
    assert vox("-h").code == 0


def test_version(vox) -> None:
    assert vox("--version") == (0, f"vox {version('vox-ml')}\n", "")


def test_every_flag_of_train_stands_under_one_heading(vox) -> None:
    placed = [name for names in TRAIN_SECTIONS.values() for name in names]
    rest = ["config_file", "plan_file", "as_json", "emit", "image"]
    assert sorted(placed) == sorted([*TrainSettings.model_fields, *rest])
    shown = vox("train", "--help").out
    headings = [line[:-1] for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [*TRAIN_SECTIONS, "Options"]
    flags = {option.name: option.opts[0] for option in train.params}
    listed = re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.M)
    assert listed[: len(placed)] == [flags[name] for name in placed]


@pytest.mark.parametrize("line", ["train", "plan", "data check", "data preview", "data stats"])
def test_the_data_files_come_first_among_the_options_of_data(vox, line: str) -> None:
    shown = vox(*line.split(), "--help").out.partition("\nData:\n")[2]
    assert re.findall(r"^  (--\S+)", shown, re.M)[:2] == ["--data", "--valid"]


def test_groups_share_one_class() -> None:
    children = [root.get_command(click.Context(root), name) for name in COMMANDS]
    assert all(isinstance(child, Group) for child in children if isinstance(child, click.Group))
