"""All rows of a library: its files are read, its things get their public names, then rows are made.

A file that cannot be read or parsed is named and passed over. What is read stays in memory as
definitions, for a thing's name may be decided by the last file; syntax trees do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from vox_extract.docstring import Docstrings
from vox_extract.exports import PublicNames, is_private
from vox_extract.locate import Library, SourceFile
from vox_extract.python import Source, rows_of
from vox_extract.rows import Extracted, Sieve
from vox_extract.source import Definition, Module, Unparsable, parse

Read: TypeAlias = Callable[[SourceFile, int], None]
"""Is told of each file that was read, with its bytes."""


@dataclass
class Faults:
    """Files that were passed over, each with the reason."""

    unread: list[str] = field(default_factory=list)


def python_rows(
    library: Library, sieve: Sieve, faults: Faults, *, private: bool, read: Read
) -> Iterator[Extracted]:
    """The rows that are kept, in the order of files and lines."""
    docstrings = Docstrings()
    modules = _modules(library, faults, read)
    names = PublicNames({each.name: each for each, _ in modules})
    for module, file in modules:
        for definition in sorted(module.definitions, key=lambda each: (each.line, each.name)):
            name = names.of(definition.module, definition.name)
            if is_private(name) and not private:
                sieve.left_out["private"] += bool(definition.doc) and not _is_of_class(name)
                continue
            yield from _rows(library, file, definition, name, docstrings, sieve, faults)


def _is_of_class(name: str) -> bool:
    """What these say is said of their class."""
    return name.endswith((".__init__", ".__new__"))


def _rows(
    library: Library,
    file: SourceFile,
    definition: Definition,
    name: str,
    docstrings: Docstrings,
    sieve: Sieve,
    faults: Faults,
) -> Iterator[Extracted]:
    source = Source(library.package, library.version, file.relative, library.licence)
    try:
        made = list(
            rows_of(definition, name, source, docstrings, max_characters=sieve.max_characters)
        )
    except RecursionError as error:  # directives within directives
        faults.unread.append(f"{file.relative}, line {definition.line}: {error}")
        return
    yield from sieve.keep(iter(made))


def _modules(library: Library, faults: Faults, read: Read) -> list[tuple[Module, SourceFile]]:
    modules: list[tuple[Module, SourceFile]] = []
    for file in library.files:
        try:
            source = content(file.path)
            module = parse(
                source, file.module, is_package=file.is_package, stub=file.path.suffix == ".pyi"
            )
        except (OSError, Unparsable) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            faults.unread.append(f"{file.relative}: {reason}")
            continue
        read(file, len(source))
        modules.append((module, file))
    return modules


def content(path: Path) -> bytes:
    """The bytes of a regular file; a pipe or a device is none."""
    if not path.is_file():
        raise OSError(0, "it is no regular file")
    return path.read_bytes()
