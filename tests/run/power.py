"""What may be on a disk after a power cut: a file system that knows what was flushed.

`Recorded` carries out every call on the real disk and keeps a model beside it: for each file what
was flushed and the writes since, for each folder its flushed entries and the changes since. After
a power cut

- of what was written to a file and not flushed there may be nothing, any part from the beginning,
  or all of the length with zeros where data should be;
- of a folder's unflushed changes (a name made, removed, renamed) any may have happened and any not,
  whatever their order, each of them wholly or not at all;
- what was flushed is there. A flushed file whose name was not flushed has no name.

This is what POSIX leaves open; real file systems promise more.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from vox_core.files import Calls

Tree: TypeAlias = "tuple[tuple[str, bytes | Tree], ...]"
"""The content of a folder: (name, bytes of a file or the tree of a folder), sorted."""

Change: TypeAlias = "tuple[str | None, str | None, File | Folder]"
"""(the name that goes, the name that comes, what has it)."""


# Some hundreds where all is flushed in its turn; what is not doubles them, one after the other.
MOST = 10_000


@dataclass(eq=False)
class File:
    flushed: bytes = b""
    since: list[bytes] = field(default_factory=list)

    def states(self) -> Iterator[bytes]:
        """What may be read of it."""
        yield self.flushed
        content = self.flushed
        for data in self.since:
            yield content + data[: len(data) // 2]
            content += data
            yield content
        if self.since:
            yield self.flushed + bytes(len(content) - len(self.flushed))
            yield content[:-1] + b"\0"


@dataclass(eq=False)
class Folder:
    flushed: dict[str, File | Folder] = field(default_factory=dict)
    since: list[Change] = field(default_factory=list)

    def entries(self) -> list[dict[str, File | Folder]]:
        """Which names may be there."""
        found: list[dict[str, File | Folder]] = []
        for chosen in itertools.product((False, True), repeat=len(self.since)):
            entries = dict(self.flushed)
            for change in itertools.compress(self.since, chosen):
                _apply(entries, change)
            if entries not in found:
                found.append(entries)
        return found

    def states(self) -> Iterator[Tree]:
        for entries in self.entries():
            names = sorted(entries)
            for contents in itertools.product(*({*entries[name].states()} for name in names)):
                yield tuple(zip(names, contents, strict=True))

    def now(self) -> dict[str, File | Folder]:
        entries = dict(self.flushed)
        for change in self.since:
            _apply(entries, change)
        return entries


def _apply(entries: dict[str, File | Folder], change: Change) -> None:
    old, new, what = change
    if old is not None and entries.get(old) is what:
        del entries[old]
    if new is not None:
        entries[new] = what


def lay(tree: Tree, folder: Path) -> None:
    """Make `folder` with that content."""
    folder.mkdir()
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            lay(content, folder / name)


class Recorded(Calls):
    """Calls on the real disk below `root`, and every state that a power cut may leave.

    Args:
        forgets: `(kind, path)` -> whether that flush does nothing; for mutants.

    Attributes:
        announced: the newest step that was announced; for the caller to set.
        outcomes: tree -> the newest step announced when it was possible.
    """

    def __init__(self, root: Path, forgets: Mapping[str, object] | None = None) -> None:
        self._root, self._top = root, Folder()
        self._open: dict[int, tuple[Path, File | Folder]] = {}
        self._forgets = forgets or {}
        self.announced = 0
        self.outcomes: dict[Tree, int] = {}

    def _at(self, path: Path) -> File | Folder:
        found: File | Folder = self._top
        for part in path.relative_to(self._root).parts:
            assert isinstance(found, Folder)
            found = found.now()[part]
        return found

    def _change(self, old: Path | None, new: Path | None, what: File | Folder) -> None:
        parent = self._at((old or new or self._root).parent)
        assert isinstance(parent, Folder)
        parent.since.append((old.name if old else None, new.name if new else None, what))
        self.cut()

    def cut(self) -> None:
        """Keep every state in which the disk may be if the power goes now."""
        for tree in self._top.states():
            self.outcomes[tree] = max(self.outcomes.get(tree, 0), self.announced)
            assert len(self.outcomes) < MOST, "hardly anything is flushed"

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        file = File()
        self._open[descriptor] = (path, file)
        self._change(None, path, file)
        return descriptor

    def open_folder(self, path: Path) -> int:
        descriptor = super().open_folder(path)
        self._open[descriptor] = (path, self._at(path))
        return descriptor

    def write(self, descriptor: int, data: object) -> int:
        count = super().write(descriptor, data)  # type: ignore[arg-type]
        _, file = self._open[descriptor]
        assert isinstance(file, File)
        file.since.append(bytes(memoryview(data)[:count]))  # type: ignore[arg-type]
        self.cut()
        return count

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        path, what = self._open[descriptor]
        if path.name.startswith(tuple(self._forgets)):
            return
        if isinstance(what, File):
            what.flushed, what.since = b"".join([what.flushed, *what.since]), []
        else:
            what.flushed, what.since = what.now(), []
        self.cut()

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        del self._open[descriptor]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        assert source.parent == target.parent
        self._change(source, target, self._at(source))

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._change(None, path, Folder())

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._change(path, None, self._at(path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        self._change(path, None, self._at(path))


def removed(path: Path) -> None:
    """Remove a tree that `lay` made."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            Path(folder, name).unlink()
        Path(folder).rmdir()
