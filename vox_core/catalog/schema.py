"""What may stand in one entry of a catalog, key by key.

The dataclasses of entries.py are the list of keys (kebab-case in the file); a field without a
default has to be there. `_CHECKS` says what each takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

from vox_core.catalog.entries import (
    BundleEntry,
    DeviceTier,
    ModelEntry,
    ModelPart,
    PayloadKind,
    PluginEntry,
    Status,
    Trust,
)
from vox_core.contract import DType, Method, Optimizer, Quant

Entry: TypeAlias = PluginEntry | BundleEntry | ModelEntry

SECTIONS: dict[str, type[Entry]] = {
    "plugin": PluginEntry,
    "bundle": BundleEntry,
    "model": ModelEntry,
}
TABLES: dict[str, type[Entry | ModelPart]] = {**SECTIONS, "model.parts": ModelPart}
_CATALOG = "catalog"
"""The one field that the file does not say about itself."""

_ID = r"[a-z0-9]+([-._][a-z0-9]+)*"
_DISTRIBUTION = r"[A-Za-z0-9]+([-._]+[A-Za-z0-9]+)*"
_VERSION = r"[0-9][A-Za-z0-9.+!]*"
_SHA256 = r"[0-9a-f]{64}"
_SOURCE = (
    r"local:[^\s-]\S*"
    rf"|pypi:{_DISTRIBUTION}=={_VERSION}"
    r"|git:[a-z]+://\S+@[0-9a-f]{40}"
    r"|wheel:[^\s-]\S*\.whl"
)
SOURCE_FORMS = '"local:PATH", "pypi:NAME==VERSION", "git:URL@COMMIT" or "wheel:PATH-OR-URL"'


class Check(NamedTuple):
    """Whether a value will do, and what would have done."""

    good: Callable[[Any], bool]
    expected: str


def section_faults(document: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with each entry of one file by itself."""
    for key, tables in document.items():
        if key not in SECTIONS:
            yield f"{key}: unknown; expected {', '.join(f'[[{name}]]' for name in SECTIONS)}"
        elif not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            yield f"{key}: expected [[{key}]] tables"
        else:
            for number, table in enumerate(tables, 1):
                where = label(key, table, number)
                yield from (f"{where}: {fault}" for fault in _table_faults(key, table))


def label(section: str, table: Mapping[str, Any], number: int) -> str:
    """How an entry is called in a report: by its id, or by its place."""
    return f"{section} {table.get('id', f'number {number}')}"


def entry(section: str, table: Mapping[str, Any], path: Path) -> Entry:
    """The entry that a table without faults describes."""
    values = {key.replace("-", "_"): _frozen(value) for key, value in table.items()}
    if "parts" in values:
        values["parts"] = tuple(ModelPart(**part) for part in values["parts"])
    if any(field.name == _CATALOG for field in fields(SECTIONS[section])):
        values[_CATALOG] = path
    return SECTIONS[section](**values)


def keys(section: str) -> dict[str, Field[Any]]:
    """Key -> field of the entries in a section."""
    known = fields(TABLES[section])
    return {field.name.replace("_", "-"): field for field in known if field.name != _CATALOG}


def expected(section: str, key: str) -> str:
    """What a key takes, in words."""
    return _check(section, key).expected


def is_required(field: Field[Any]) -> bool:
    """Whether an entry has to have the key."""
    return field.default is MISSING and field.default_factory is MISSING


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _table_faults(section: str, table: Mapping[str, Any]) -> Iterator[str]:
    known = keys(section)
    for key in table:
        if key not in known:
            yield f"{key}: unknown; expected one of {', '.join(known)}"
    for key, field in known.items():
        check = _check(section, key)
        if key not in table:
            if is_required(field):
                yield f"{key}: missing; expected {check.expected}"
        elif not check.good(table[key]):
            yield f"{key}: found {table[key]!r}, expected {check.expected}"
        elif key == "parts":
            for number, part in enumerate(table[key], 1):
                yield from (
                    f"part {number}: {fault}" for fault in _table_faults("model.parts", part)
                )


# --- what a value may be --------------------------------------------------------------------------


def _matches(pattern: str, expected: str) -> Check:
    return Check(
        lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)), expected
    )


def _one_of(kind: Any) -> Check:
    choices = get_args(kind)
    return Check(lambda value: value in choices, ", ".join(f'"{choice}"' for choice in choices))


def _list_of(item: Check, expected: str) -> Check:
    return Check(
        lambda value: (
            isinstance(value, list)
            and all(item.good(each) for each in value)
            and len(set(value)) == len(value)
        ),
        expected,
    )


def _table_of(key: str, item: Check, expected: str) -> Check:
    return Check(
        lambda value: (
            isinstance(value, dict)
            and all(re.fullmatch(key, name) and item.good(each) for name, each in value.items())
        ),
        expected,
    )


def _capabilities() -> Check:
    names = _list_of(_TEXT, "")
    kinds = {
        "devices": names,
        "quantisations": _list_of(_one_of(Quant), ""),
        "dtypes": _list_of(_one_of(DType), ""),
        "methods": _list_of(_one_of(Method), ""),
        "families": names,
        "distributed": names,
        "optimizers": _list_of(_one_of(Optimizer), ""),
    }
    return Check(
        lambda value: (
            isinstance(value, dict)
            and all(name in kinds and kinds[name].good(each) for name, each in value.items())
        ),
        f"a table of lists, as in a manifest: {', '.join(kinds)}",
    )


def _parsed_by(parse: Callable[[str], object], expected: str) -> Check:
    """What a parser of `packaging` takes; all of its errors are ValueErrors."""

    def good(value: Any) -> bool:
        try:
            return isinstance(value, str) and parse(value) is not None
        except ValueError:
            return False

    return Check(good, expected)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


_TEXT = _matches(r".*\S.*", "a text")


def _check(section: str, key: str) -> Check:
    """What `key` takes. A plugin's `sha256` is a table: it has as many artifacts as it likes."""
    return _checks().get(f"{section}.{key}") or _checks().get(key) or _TEXT


@cache
def _checks() -> dict[str, Check]:
    from packaging.markers import Marker
    from packaging.specifiers import SpecifierSet

    an_id = _matches(_ID, "lower-case letters and digits, joined by - . or _")
    a_source = _matches(_SOURCE, SOURCE_FORMS)
    a_digest = _matches(_SHA256, "64 lower-case hexadecimal digits")
    return {
        "id": an_id,
        "payload-kind": _one_of(PayloadKind),
        "provides": _table_of(
            r"[a-z][a-z0-9-]*",
            _list_of(_TEXT, ""),
            'a table EXTENSION-POINT = ["NAME", …], each name once',
        ),
        "exposes-tools": _list_of(_TEXT, "a list of names, each once"),
        "requires-tag": _matches(r"[a-z][a-z0-9_-]*", "the tag of a device"),
        "default-source": a_source,
        "bundled-in": _list_of(an_id, "a list of ids of bundles, each once"),
        "extends": _list_of(an_id, "a list of ids of bundles, each once"),
        "plugins": _list_of(an_id, "a list of ids of plugins, each once"),
        "libraries": _table_of(_DISTRIBUTION, a_source, f"a table DISTRIBUTION = {SOURCE_FORMS}"),
        "distribution": _matches(_DISTRIBUTION, "the name of a distribution"),
        "specifier": _parsed_by(SpecifierSet, 'versions as PEP 440 has them, such as ">=1,<2"'),
        "import-package": _matches(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a package"),
        "api": _matches(r"\d+\.\d+", '"MAJOR.MINOR"'),
        "platforms": _parsed_by(Marker, "a PEP 508 marker, such as \"sys_platform == 'linux'\""),
        "capabilities": _capabilities(),
        "device-tier": _one_of(DeviceTier),
        "plugin.sha256": _table_of(
            r"[^/\\\s]+(\.whl|\.tar\.gz)", a_digest, f"a table FILE = {a_digest.expected}"
        ),
        "trust": _one_of(Trust),
        "status": _one_of(Status),
        "source": _matches(rf"wheel:{_DISTRIBUTION}=={_VERSION}", '"wheel:NAME==VERSION"'),
        "sha256": a_digest,
        "size": Check(_is_count, "a number of bytes"),
        "parameters": Check(_is_count, "a number"),
        "hub": _matches(r"\w[\w.-]*/\w[\w.-]*", '"OWNER/NAME"'),
        "gated": Check(lambda value: isinstance(value, bool), "true or false"),
        "file": _matches(r"[^/\\].*\.gguf(\.part\d+)?", "a .gguf file inside the wheel, or a part"),
        "parts": Check(_are_tables, "tables [[model.parts]]"),
    }
