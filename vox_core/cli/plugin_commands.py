"""Read the commands of installed plugins from their manifests, without importing a plugin.

    [[commands]]
    name = "data stats"
    help = "Rows, lengths, duplicates, languages."
    entry = "vox_data.cli:stats"

`vox --help` must cost little more than click, also among 300 distributions, so this module reads
`entry_points.txt` and `vox_plugin.toml` itself, without importlib.metadata, pydantic and pathlib,
whose imports take longer. It skips whatever it cannot read; the doctor (doctor.py), with
discover.py and the strict schema of manifest.py, reports it.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

FILE_NAME = "vox_plugin.toml"
_GROUP = "[vox_core.plugins]"


class PluginCommand(NamedTuple):
    """A command that a plugin declares; `path` is its name, split at spaces."""

    plugin: str
    path: tuple[str, ...]
    help: str
    entry: str


def installed_commands() -> list[PluginCommand]:
    """Return every declared command, sorted by path and plugin; duplicates stay."""
    hidden: set[str] = set()
    found = {
        command
        for folder in dict.fromkeys(sys.path)
        for plugin, package in _entry_points(folder or ".", hidden)
        for command in _declared(plugin, package)
    }
    return sorted(found, key=lambda command: (command.path, command.plugin))


def _entry_points(folder: str, hidden: set[str]) -> Iterator[tuple[str, str]]:
    """Yield id and top-level package of each plugin whose metadata is in a folder of `sys.path`.

    Args:
        hidden: distributions found so far, which hide later ones of their name.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith((".dist-info", ".egg-info")):
            try:
                text = _text(entry.path, "entry_points.txt")
            except (OSError, ValueError):
                continue
            distribution = entry.name.partition("-")[0].lower().replace(".", "_")
            if _GROUP in text and distribution not in hidden:
                hidden.add(distribution)
                section = text.partition(_GROUP)[2].partition("\n[")[0]
                for line in section.splitlines():
                    plugin, equals, target = line.partition("=")
                    if equals:
                        yield plugin.strip(), target.strip().partition(":")[0].partition(".")[0]


def _declared(plugin: str, package: str) -> Iterator[PluginCommand]:
    for folder in _folders(package):
        try:
            document = tomllib.loads(_text(folder, FILE_NAME))
        except (OSError, ValueError, RecursionError):
            continue
        listed = document.get("commands")
        for table in listed if isinstance(listed, list) else ():
            if _is_command(table):
                words = tuple(table["name"].split())
                yield PluginCommand(plugin, words, table["help"], table["entry"])
        return


def _folders(package: str) -> list[str]:
    """Find the folders of a top-level package, which does not import it."""
    for finder in sys.meta_path:  # as importlib.util.find_spec does, which takes 3 ms to import
        with suppress(ImportError, AttributeError, ValueError):
            if spec := finder.find_spec(package, None):
                return [*(spec.submodule_search_locations or ())]
    return []


def _text(folder: str, name: str) -> str:
    with open(f"{folder}/{name}", encoding="utf-8") as file:  # noqa: PTH123
        return file.read()


def _is_command(table: Any) -> bool:
    keys = ("name", "help", "entry")
    return isinstance(table, dict) and all(
        isinstance(table.get(key), str) and table[key].strip() for key in keys
    )
