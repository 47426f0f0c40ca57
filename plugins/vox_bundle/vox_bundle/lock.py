"""`pylock.toml` (PEP 751) of the installed plugins and of everything that they need.

Nothing is resolved anew. A folder, commit or archive is written as direct_url.json (PEP 610) has
it. For versions from an index uv looks up files, hashes and sizes; where it finds none, off the
network for example, the entry has name and version only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from vox_core.api.files import write_text
from vox_core.api.installing import (
    ONLY_WHEELS,
    Environment,
    Uv,
    closure,
    discover,
    local_path,
    origin,
)
from vox_core.errors import InputError

_HEAD = 'lock-version = "1.0"\ncreated-by = "vox-ml"\n'


def write_lock(path: Path, environment: Environment) -> list[str]:
    """Write the lock of the installed plugins; return the names of those without a hash."""
    there, uv = environment.installed, Uv(environment)
    names = closure([canonicalize_name(each.distribution) for each in discover()], there.needs)
    direct = {name: _direct(origin(there.distributions[name])) for name in names}
    pins = {name: f"{name}=={there.versions[name]}" for name in names if not direct[name]}
    text = _indexed(uv, [*pins.values()])
    unknown = []
    if text is None:  # one at a time, for those that are to be had
        unknown = [name for name, pin in pins.items() if _indexed(uv, [pin]) is None]
        text = _indexed(uv, [pin for name, pin in pins.items() if name not in unknown])
    text = text or _HEAD
    for name in [*filter(direct.get, names), *unknown]:
        version = json.dumps(there.versions[name])
        text += f"\n[[packages]]\nname = {json.dumps(name)}\nversion = {version}\n{direct[name]}"
    write_text(path, text)
    return unknown


def _indexed(uv: Uv, pins: list[str]) -> str | None:
    """uv's lock of the pins; None if it finds no file of one."""
    try:
        return uv.lock(pins, ["--no-deps", *ONLY_WHEELS]) if pins else _HEAD
    except InputError:
        return None


def _direct(source: Mapping[str, Any]) -> str:
    """The source of what did not come from an index, as TOML; empty for what did."""
    url = source.get("url", "")
    if "dir_info" in source:
        editable = bool(source["dir_info"].get("editable"))
        return f"directory = {_inline(path=str(local_path(url)), editable=editable)}\n"
    if vcs := source.get("vcs_info"):
        commit = {"commit-id": vcs["commit_id"]}
        return f"vcs = {_inline(type=vcs['vcs'], url=url, **commit)}\n"
    if hashes := source.get("archive_info", {}).get("hashes"):
        return f"archive = {{ url = {json.dumps(url)}, hashes = {_inline(**hashes)} }}\n"
    return ""


def _inline(**values: Any) -> str:
    """An inline table; a JSON string or boolean is one of TOML as well."""
    return f"{{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in values.items())} }}"
