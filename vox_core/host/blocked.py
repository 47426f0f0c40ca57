"""Read and write the ids of plugins that the user disabled or blocked.

    vox plugin disable ID     kept in `plugins.json` in the configuration folder of the user
    vox.toml                  [plugin] blocked = ["id"], for a project
    VOX_DISABLE_PLUGINS       ids with commas between them, for one command

A blocked plugin stays installed and is listed with this reason; vox neither chooses nor imports
it. `vox plugin remove` also removes it from the user's list; otherwise it would be disabled when
installed again.

An unknown id may be misspelt, or belong to a plugin that was removed. In the variable it is an
error. In `vox.toml` it is a warning of the commands that list plugins. In the user's file it is
ignored.

`VOX_CONFIG` names the configuration folder; without it it follows the platform (`~/.config/vox` on
Linux).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from platformdirs import user_config_path

from vox_core import files
from vox_core.config import PluginSettings, load_settings, settings_file
from vox_core.errors import ConfigError, OutputError, StorageError
from vox_core.host.discover import known_plugins
from vox_core.text import hint

VARIABLE = "VOX_DISABLE_PLUGINS"
COMMAND = "`vox plugin disable`"
STATE_FILE = "plugins.json"


def blocked_plugins(installed: Sequence[str]) -> dict[str, str]:
    """Return id -> the place that blocks it, for every blocked plugin.

    Raises:
        ConfigError: the variable names one that is unknown, or a file cannot be read.
    """
    variable = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if {*variable} - {*installed}:
        known = sorted({*installed, *known_plugins()})
        if unknown := sorted({*variable} - {*known}):
            raise ConfigError(
                "C002",
                f"{VARIABLE} names unknown plugins",
                faults=[f"{name}{hint(name, known)}" for name in unknown],
                expected=f"some of: {', '.join(known)}",
                remedy="correct it; `vox plugin list` lists the plugins",
            )
    project = load_settings(PluginSettings, {}).blocked
    return {
        **dict.fromkeys(disabled(), COMMAND),
        **dict.fromkeys(project, str(settings_file())),
        **dict.fromkeys(variable, VARIABLE),
    }


def unknown_blocked(installed: Sequence[str]) -> tuple[str, ...]:
    """Return a warning for each id in `vox.toml` that is neither installed nor in the catalog."""
    unknown = {*load_settings(PluginSettings, {}).blocked} - {*installed}
    try:
        known = sorted({*installed, *known_plugins()}) if unknown else []
    except ConfigError:  # a faulty catalog is reported by those who need it
        return ()
    return tuple(
        f"[plugin] blocked in {settings_file()}: there is no plugin {name}{hint(name, known)}"
        for name in sorted(unknown - {*known})
    )


def blocking(plugin_id: str, who: str) -> str:
    """Say that a plugin is disabled or blocked; `who` is a value of `blocked_plugins`."""
    if who == COMMAND:
        return f"disabled; to use it again: {unblock(plugin_id, who)}"
    return f"blocked by {who}"


def unblock(plugin_id: str, who: str) -> str:
    """Return the command or edit that enables a blocked plugin again."""
    if who == COMMAND:
        return f"vox plugin enable {plugin_id}"
    return f"take {plugin_id} off {who if who == VARIABLE else f'[plugin] blocked in {who}'}"


def disabled(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the ids in the user's file, sorted (C008 if it cannot be read)."""
    file = config_folder(environ) / STATE_FILE
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))["disabled"]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise _unreadable(file, f"disabled: {ids!r}")
    return tuple(sorted(ids))


def set_disabled(ids: Iterable[str], environ: Mapping[str, str] = os.environ) -> Path:
    """Write the user's file and return its path.

    Raises:
        OutputError: the configuration folder cannot be made.
        StorageError: the file cannot be written.
    """
    folder = config_folder(environ)
    try:
        files.make_folder(folder)
        files.write_json(folder / STATE_FILE, {"disabled": sorted(set(ids))})
    except (OutputError, StorageError) as error:
        error.remedy = f"make {folder} a folder that you can write to, or name another: VOX_CONFIG"
        raise
    return folder / STATE_FILE


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the user's own settings, which may not exist yet."""
    if named := environ.get("VOX_CONFIG"):
        return Path(named).expanduser().absolute()
    return user_config_path("vox", appauthor=False)


def _unreadable(file: Path, found: str) -> ConfigError:
    return ConfigError(
        "C008",
        "the list of disabled plugins cannot be read",
        where=file,
        found=found,
        expected='{"disabled": ["id", …]}',
        remedy="mend the file, or move it away to enable every plugin",
    )
