"""Find the source files of a name on the command line, without importing anything.

    stdlib          the whole standard library
    json            a module or package of the standard library
    numpy           an import package that is installed
    attrs           a distribution: all of its import packages
    ./folder, a.py  what has a separator in it, or ends in .py or .pyi

Left out are tests, hidden folders and folders of environments and builds. Files come sorted by
path. A `.pyi` file is read where there is no `.py` of the same name.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeAlias, TypeVar

from vox_core.errors import DataError
from vox_extract import provenance
from vox_extract.provenance import Project, project_of

STANDARD = "stdlib"
MAX_BYTES = 10_000_000

T = TypeVar("T")
Progress: TypeAlias = Callable[[str, int, int], None]
"""Label, bytes done, bytes in all."""

_SUFFIXES = (".py", ".pyi")
_LEGAL = re.compile(r"(?i)(licen[cs]e|copying|code.of.conduct|third.party.*)")
_TESTS = {"test", "tests", "conftest.py"}
_NOT_SOURCE = {"__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist"}
_NOT_SOURCE_MARK = "pyvenv.cfg"
# Applications that come with the standard library, and jokes.
_NOT_LIBRARY = {"idlelib", "turtledemo", "antigravity", "this", "__phello__", "lib2to3"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be read.

    Args:
        relative: its path from the folder that holds the package, with slashes.
        module: its dotted name.
        leads_out: it is a link out of the folder that was named, and is not read.
    """

    path: Path
    relative: str
    module: str
    leads_out: bool = False


@dataclass(frozen=True, slots=True)
class Library:
    """Files whose names refer to one another, and their provenance.

    Args:
        package: as its provenance names it.
    """

    package: str
    version: str
    licence: str
    files: tuple[SourceFile, ...]

    def provenance(self, file: SourceFile, line: int, thing: str) -> dict[str, str | int]:
        """Return the provenance of a row."""
        return {
            "package": self.package,
            "version": self.version,
            "file": file.relative,
            "line": line,
            "object": thing,
            "licence": self.licence,
        }


class Reader:
    """Read source files; count them, and keep the reason for each that cannot be read.

    Args:
        total: bytes of all files that will be read.
    """

    def __init__(self, total: int = 0, progress: Progress | None = None) -> None:
        self.files, self.unread = 0, list[str]()
        self._total, self._progress, self._done = total, progress, 0

    def read(self, file: SourceFile, parse: Callable[[bytes], T]) -> T | None:
        """Parse a regular file; None if it is unreadable."""
        try:
            if not file.path.is_file():  # a pipe would block
                raise ValueError("it is no regular file")
            if file.leads_out:
                raise ValueError("it is a link that leads out of the folder")
            if file.path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
            source = file.path.read_bytes()
            found = parse(source)
        except SyntaxError as error:
            self.unread.append(f"{file.relative}: line {error.lineno or 1}: {error.msg}")
        except OSError as error:
            self.unread.append(f"{file.relative}: {error.strerror}")
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes; too deep nesting
            self.unread.append(f"{file.relative}: {str(error) or 'it is nested too deeply'}")
        else:
            self.files, self._done = self.files + 1, self._done + len(source)
            if self._progress:
                self._progress("reading", min(self._done, self._total), self._total)
            return found
        return None


def locate(name: str) -> Library:
    """Find the files that a word on the command line names.

    Raises:
        DataError: D060, nothing of that name is here.
    """
    if _is_path(name):
        return of_path(Path(name))
    if name == STANDARD:
        return _standard(sorted(sys.stdlib_module_names))
    found = _standard([name]) if name in sys.stdlib_module_names else _of_installed(name)
    if found is None and Path(name).exists():
        return of_path(Path(name))
    if found is None:
        raise _not_found(name, "no module of the standard library, no installed package, no file")
    if not found.files:
        raise _not_found(name, "no Python source: it is built into Python, or written in C")
    return found


def _not_found(name: str, found: str) -> DataError:
    return DataError(
        "D060",
        "there is nothing of that name to extract from",
        where=name,
        found=found,
        expected="stdlib, an installed package or distribution, a folder, or a .py file",
        remedy="install it into this Python environment, or name the folder of its sources: ./NAME",
    )


def _is_path(name: str) -> bool:
    return name in (".", "..") or any(sep in name for sep in "/\\") or name.endswith(_SUFFIXES)


# --- by name --------------------------------------------------------------------------------------


def _standard(names: Iterable[str]) -> Library:
    """Modules of the standard library; those of C have no file here."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for name in names
        if name not in _NOT_LIBRARY | _TESTS
        for file in _top_level(root, name)
    ]
    version = platform.python_version()
    return Library("python", version, provenance.STANDARD_LIBRARY, tuple(files))


def _of_installed(name: str) -> Library | None:
    """A name of both kinds, such as attrs, means the distribution with all its packages."""
    if name in _packages().get(name, ()):
        return _of_distribution(name)
    return _of_import(name) or _of_distribution(name)


@cache
def _packages() -> Mapping[str, list[str]]:
    """Import package -> the distributions that bring it."""
    return metadata.packages_distributions()  # reads what every distribution has installed


def _of_import(name: str) -> Library | None:
    """An import package, found by what Python itself would look at for a top-level name."""
    if not name.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ())]
    origin = [spec.origin] if spec.origin and not places else []
    roots = [Path(each).parent for each in [*places, *origin] if Path(each).exists()]
    files = [file for root in roots for file in _top_level(root, name)]
    owner = min(_packages().get(name, ()), default=None)
    described = _described(owner) if owner else None
    if described is None:
        described = _of_folder(roots[0] / name, name) if roots else Project(name, None, None)
    return _library(described, files)


def _of_distribution(name: str) -> Library | None:
    """A distribution, and all that it brings."""
    described = _described(name)
    if described is None:
        return None
    tops = {
        Path(each.parts[0]).stem if len(each.parts) == 1 else each.parts[0]
        for each in metadata.files(name) or ()
        if each.suffix in _SUFFIXES and each.parts[0] not in ("..", "__pycache__")
    }
    found = [_of_import(top) for top in sorted(tops)]
    files = [file for each in found if each for file in each.files]
    return _library(described, files)


def _described(distribution: str) -> Project | None:
    try:
        found = metadata.metadata(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    declared = provenance.of_metadata(found)  # type: ignore[arg-type]  # a Message in all but name
    return Project(found["Name"], found["Version"], declared)


# --- by path --------------------------------------------------------------------------------------


def of_path(path: Path, suffixes: tuple[str, ...] = _SUFFIXES) -> Library:
    """The files below a folder that have one of the suffixes, or one file.

    Raises:
        DataError: D060, there is none.
    """
    if not path.exists():
        raise _not_found(str(path), "nothing there")
    path = path.resolve()
    folder, name = (path.parent, path.stem) if path.is_file() else (path, path.name)
    if path.is_file():
        files = [SourceFile(path, path.name, name)]
    else:
        root = path.parent if (path / "__init__.py").is_file() else path
        files = list(_below(path, root, suffixes))
    if not files:
        raise _not_found(str(path), f"a folder without {' or '.join(suffixes)}")
    return _library(_of_folder(folder, name), files)


def _of_folder(folder: Path, name: str) -> Project:
    """Read name, version and licence from a pyproject.toml in the folder or above."""
    found = project_of(folder)
    declared = found.licence or provenance.nearby(folder)
    return Project(found.name or name, found.version, declared)


def _library(described: Project, files: Iterable[SourceFile]) -> Library:
    unique = {file.path: file for file in files}
    return Library(
        described.name or provenance.UNKNOWN,
        described.version or provenance.UNKNOWN,
        described.licence or provenance.UNKNOWN,
        tuple(sorted(unique.values(), key=lambda file: file.relative)),
    )


def _top_level(root: Path, name: str) -> Iterator[SourceFile]:
    """The files of the package or module `name` in a folder of such."""
    if (root / name).is_dir():
        yield from _below(root / name, root, installed=True)
        return
    for suffix in _SUFFIXES:
        if (path := root / f"{name}{suffix}").is_file():
            yield SourceFile(path, path.name, name)
            return


def _below(
    folder: Path, root: Path, suffixes: tuple[str, ...] = _SUFFIXES, *, installed: bool = False
) -> Iterator[SourceFile]:
    """The sources below a folder, which is in `root`.

    Args:
        installed: a module's name is its whole path, for `root` is on Python's own; else it begins
            at the topmost package that the module is in.
    """
    for where, folders, names in os.walk(folder):
        here = Path(where)
        folders[:] = sorted(each for each in folders if _is_read(here / each))
        for path in (here / name for name in sorted(names)):
            stub = path.suffix == ".pyi" and f"{path.stem}.py" in names
            if path.suffix.lower() in suffixes and not _is_left_out(path) and not stub:
                module = _dotted(path.relative_to(root)) if installed else _module(path, root)
                leads_out = not installed and not path.resolve().is_relative_to(folder.resolve())
                yield SourceFile(path, path.relative_to(root).as_posix(), module, leads_out)


def _is_read(folder: Path) -> bool:
    name = folder.name
    left_out = name in _NOT_SOURCE | _TESTS or name.startswith(".")
    return not left_out and not (folder / _NOT_SOURCE_MARK).exists()


def _is_left_out(path: Path) -> bool:
    """Whether it is a test, or a legal text in Markdown."""
    if path.suffix not in _SUFFIXES:
        return bool(_LEGAL.match(path.stem))
    return path.name in _TESTS or path.stem.startswith("test_") or path.stem.endswith("_test")


def _module(path: Path, root: Path) -> str:
    top = path.parent
    while top != root and (top / "__init__.py").is_file():
        top = top.parent
    if top == path.parent == root and path.stem == "__init__":
        top = path.parent.parent
    return _dotted(path.relative_to(top))


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
