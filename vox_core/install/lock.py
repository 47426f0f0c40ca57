"""`pylock.toml` (PEP 751) of the installed plugins and of everything that they need.

The lock describes what is installed; nothing is resolved anew. A folder, commit or archive is
written as direct_url.json (PEP 610) has it. For versions from an index uv looks up files, hashes
and sizes; where it finds none, off the network for example, the entry has name and version only.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from vox_core import files
from vox_core.errors import InputError
from vox_core.host.discover import discover
from vox_core.install.environment import Environment, closure, local_path, origin
from vox_core.install.uv import ONLY_WHEELS, Uv

FILE_NAME = "pylock.toml"
_HEAD = 'lock-version = "1.0"\ncreated-by = "vox-ml"\n'


def write_lock(path: Path, environment: Environment) -> list[str]:
    """Write the lock of the installed plugins; the names of those without a hash.

    Raises:
        StorageError: it cannot be written.
    """
    there = environment.installed()
    plugins = [canonicalize_name(plugin.distribution) for plugin in discover()]
    names = closure(plugins, there.needs)
    direct = {name: source for name in names if (source := _direct(there.distributions[name]))}
    pins = {name: f"{name}=={there.versions[name]}" for name in names if name not in direct}
    text, unknown = _indexed(Uv(environment), pins)
    for name, source in {**direct, **dict.fromkeys(unknown, "")}.items():
        version = json.dumps(there.versions[name])
        text += f"\n[[packages]]\nname = {json.dumps(name)}\nversion = {version}\n{source}"
    files.write_text(path, text)
    return unknown


def _indexed(uv: Uv, pins: dict[str, str]) -> tuple[str, list[str]]:
    """uv's lock of the pins that it finds files of, and the names of the others."""
    if not pins:
        return _HEAD, []
    try:
        return uv.lock([*pins.values()], ONLY_WHEELS), []
    except InputError:
        unknown = [name for name, pin in pins.items() if not _is_found(uv, pin)]
        found = [pin for name, pin in pins.items() if name not in unknown]
        return (uv.lock(found, ONLY_WHEELS) if found else _HEAD), unknown


def _is_found(uv: Uv, pin: str) -> bool:
    try:
        return bool(uv.lock([pin], ONLY_WHEELS))
    except InputError:
        return False


def _direct(distribution: metadata.Distribution) -> str:
    """The source of what did not come from an index, as TOML; empty for what did."""
    source = origin(distribution)
    url, table = source.get("url", ""), ""
    if "dir_info" in source:
        editable = bool(source["dir_info"].get("editable"))
        table = f"directory = {_inline(path=str(local_path(url)), editable=editable)}\n"
    elif vcs := source.get("vcs_info"):
        commit = {"commit-id": vcs["commit_id"]}
        table = f"vcs = {_inline(type=vcs['vcs'], url=url, **commit)}\n"
    elif hashes := source.get("archive_info", {}).get("hashes"):
        table = f"archive = {{ url = {json.dumps(url)}, hashes = {_inline(**hashes)} }}\n"
    return table


def _inline(**values: Any) -> str:
    """An inline table; a JSON string or boolean is one of TOML as well."""
    return f"{{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in values.items())} }}"
