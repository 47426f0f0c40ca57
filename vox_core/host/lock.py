"""`pylock.toml` (PEP 751) of the installed plugins and of everything that they need.

What is locked is what is installed; nothing is resolved anew. Where an installation came from is in
its direct_url.json (PEP 610): a folder, a commit, an archive with its hash. For what came from an
index the installer is asked for the file of that version: URL, hash and size. Where it cannot be
had, off the network for example, the entry has name and version only, and is named.

Which installed distributions need one another is read from their metadata. No plugin is imported.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from vox_core import files
from vox_core.errors import InputError
from vox_core.host.discover import discover
from vox_core.host.environment import Environment
from vox_core.host.origin import local_path, origin
from vox_core.host.resolve import archives

FILE_NAME = "pylock.toml"


def write_lock(path: Path, environment: Environment) -> list[str]:
    """Write the lock of the installed plugins; the names of those without a hash.

    Raises:
        StorageError: it cannot be written.
    """
    names = closure(canonicalize_name(plugin.distribution) for plugin in discover())
    direct = {name: source for name in names if (source := _direct(name))}
    indexed = {name: metadata.version(name) for name in names if name not in direct}
    found: Mapping[str, Mapping[str, Any]] = {}
    with suppress(
        InputError
    ):  # the installer cannot reach an index: versions are known all the same
        found = archives(environment, [f"{name}=={version}" for name, version in indexed.items()])
    sources = {**direct, **{name: _wheel(found[name]) for name in indexed if name in found}}
    files.write_text(path, "".join(_document(names, sources)))
    return [name for name in names if name not in sources]


def closure(names: Iterable[str]) -> list[str]:
    """The installed distributions of these names, and those that they need; sorted."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found and (needed := _needs(name)) is not None:
            found.add(name)
            waiting += needed
    return sorted(found)


def orphans(removed: Iterable[str], keep: Collection[str] = ()) -> list[str]:
    """What nothing but `removed` needs, directly or through one another.

    Args:
        keep: names that are needed whatever the metadata says.
    """
    needs: dict[str, list[str]] = {
        canonicalize_name(each.metadata["Name"]): _requirements(each)
        for each in metadata.distributions()
        if each.metadata["Name"]
    }
    gone = set(removed)
    while True:
        needed = {name for owner, names in needs.items() if owner not in gone for name in names}
        loose = {name for owner in gone for name in needs.get(owner, [])} & needs.keys()
        if not (more := loose - needed - gone - {*keep}):
            return sorted(gone - {*removed})
        gone |= more


def _needs(name: str) -> list[str] | None:
    try:
        return _requirements(metadata.distribution(name))
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: metadata.Distribution) -> list[str]:
    """Names of what it requires here, without its extras."""
    names: list[str] = []
    for text in distribution.requires or ():
        with suppress(InvalidRequirement):
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                names.append(canonicalize_name(required.name))
    return names


# --- pylock.toml ----------------------------------------------------------------------------------


def _direct(name: str) -> dict[str, Any] | None:
    """The source table of what did not come from an index."""
    source = origin(name)
    url = source.get("url", "")
    if "dir_info" in source:
        editable = bool(source["dir_info"].get("editable"))
        return {"directory": {"path": str(local_path(url)), "editable": editable}}
    if vcs := source.get("vcs_info"):
        return {"vcs": {"type": vcs["vcs"], "url": url, "commit-id": vcs["commit_id"]}}
    if hashes := source.get("archive_info", {}).get("hashes"):
        return {"archive": {"url": url, "hashes": hashes}}
    return None


def _wheel(archive: Mapping[str, Any]) -> dict[str, Any]:
    url = archive["source"]
    table = {"name": url.rpartition("/")[2], "url": url, "size": archive.get("size")}
    table["hashes"] = {"sha256": archive["sha256"]}
    kept = {key: value for key, value in table.items() if value is not None}
    return {"wheels": [kept]} if url.endswith(".whl") else {"sdist": kept}


def _document(names: Sequence[str], sources: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield 'lock-version = "1.0"\ncreated-by = "vox-ml"\n'
    for name in names:
        yield f"\n[[packages]]\nname = {_toml(name)}\nversion = {_toml(metadata.version(name))}\n"
        for key, table in sources.get(name, {}).items():
            yield f"{key} = {_toml(table)}\n"


def _toml(value: object) -> str:
    """Texts, numbers, booleans, lists and inline tables; a JSON string is a TOML string as well."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
