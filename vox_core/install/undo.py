"""Undo for a change of an environment: the files that it replaces, kept until it is done.

    change = begin(site_packages, "install vox-ml-cpu", added, replaced)
    …                                   # uv
    change.back()  or  change.forget()

`begin` links or copies the files that will be replaced into `.vox-change` in site-packages and
writes a journal beside them. `back` deletes what came and puts these files in their places; it can
be run again after it was cut off. After `kill -9` the journal is still there: `vox plugin doctor`
says so, and `python -m vox_core.install.undo` puts the files back.

Only the standard library is imported here, because the change that was cut off may have been one of
a library that vox needs. Bytecode is deleted, never restored: Python makes it again.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = ".vox-change"
LOCK = ".vox-lock"
"""Held by a vox that changes the environment; beside the folder."""
_JOURNAL, _KEPT, _WORKING = "journal.json", "kept", "uv.lock"


@dataclass(frozen=True, slots=True)
class OpenChange:
    """A change that has begun.

    Args:
        what: `install vox-ml-cpu`, for the person who finds it cut off.
        added: paths of the files that the change brings.
        kept: path of each file that it replaces or removes -> name of its copy.
    """

    site: Path
    what: str
    added: tuple[str, ...]
    kept: dict[str, str]

    def copy_of(self, path: str) -> Path:
        return folder(self.site) / _KEPT / self.kept[path]

    def put_back(self, path: str) -> None:
        """Restore one file atomically."""
        temporary = Path(f"{path}.vox-tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        _link(self.copy_of(path), temporary)
        # Renaming a link onto another name of the same file does nothing and leaves both.
        Path(path).unlink(missing_ok=True)
        temporary.replace(path)

    def back(self) -> list[str]:
        """Undo the change; the files that could not be put back, for whom the journal stays."""
        lost = []
        for path in self.added:
            with suppress(OSError):
                if path not in self.kept:
                    Path(path).unlink(missing_ok=True)
        for path in self.kept:
            try:
                self.put_back(path)
            except OSError as error:
                lost.append(f"{path}: {error.strerror or error}")
        _tidy([*self.added, *self.kept])
        if not lost:
            self.forget()
        return lost

    def forget(self) -> None:
        """Delete the journal, then the copies."""
        (folder(self.site) / _JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(folder(self.site), ignore_errors=True)


def folder(site: Path) -> Path:
    """The scratch folder of a change, which holds journal and copies."""
    return site / FOLDER


def begin(site: Path, what: str, added: Iterable[Path], replaced: Iterable[Path]) -> OpenChange:
    """Keep the files that a change will replace or overwrite, and write the journal.

    Args:
        added: every file that will come.
        replaced: every file of the distributions that will go.
    """
    coming = sorted({*map(str, added)})
    going = sorted({path for path in (*coming, *map(str, replaced)) if os.path.lexists(path)})
    change = OpenChange(site, what, tuple(coming), {path: str(n) for n, path in enumerate(going)})
    (folder(site) / _KEPT).mkdir(parents=True)
    for path in going:
        _link(Path(path), change.copy_of(path))
    journal = {"what": what, "added": change.added, "kept": change.kept}
    temporary = folder(site) / f"{_JOURNAL}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(journal, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder(site) / _JOURNAL)
    return change


@contextmanager
def working(site: Path) -> Iterator[int]:
    """Hold the lock that a program which changes the environment inherits.

    uv may outlive vox: after `kill -9` of vox alone it still installs. `main` waits for its end.
    """
    with (folder(site) / _WORKING).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def unfinished(site: Path) -> OpenChange | None:
    """The change that has begun in this folder and not ended."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        found = json.loads((folder(site) / _JOURNAL).read_text(encoding="utf-8"))
        return OpenChange(site, found["what"], tuple(found["added"]), dict(found["kept"]))
    return None


def remedy(python: Path) -> str:
    """The command that undoes an unfinished change."""
    command = [str(python), "-P", "-m", "vox_core.install.undo"]
    return f"put its files back: {shlex.join(command)}"


def main() -> int:
    """Undo the change of this environment that was cut off."""
    site = Path(sysconfig.get_path("purelib")).resolve()
    with ExitStack() as stack:
        with suppress(FileNotFoundError):
            change_lock = stack.enter_context((site / LOCK).open("a"))
            try:
                fcntl.flock(change_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.stderr.write(
                    "another vox is changing this environment; wait until it is done\n"
                )
                return 1
        with suppress(FileNotFoundError):
            uv_lock = stack.enter_context((folder(site) / _WORKING).open("r+"))
            fcntl.flock(uv_lock, fcntl.LOCK_EX)  # a uv that outlived its vox ends first
        return _undo(site)


def _undo(site: Path) -> int:
    change = unfinished(site)
    if change is None:
        sys.stdout.write("nothing to undo: no change of this environment was cut off\n")
        return 0
    lost = change.back()
    sys.stderr.writelines(f"not put back: {each}\n" for each in lost)
    if not lost:
        sys.stdout.write(f"undone: {change.what}\n")
    return 1 if lost else 0


def _link(source: Path, target: Path) -> None:
    """A second name, which takes no space; a copy on a file system without links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _tidy(paths: Sequence[str]) -> None:
    """Without bytecode of other versions of these files, and without empty folders."""
    for path in (path for path in paths if path.endswith(".py")):
        with suppress(OSError, NotImplementedError):
            compiled = Path(importlib.util.cache_from_source(path))
            compiled.unlink(missing_ok=True)
            compiled.parent.rmdir()
    for place in sorted({Path(path).parent for path in paths}, reverse=True):
        for empty in (place, *place.parents):
            try:
                empty.rmdir()
            except OSError:  # not empty
                break


if __name__ == "__main__":
    raise SystemExit(main())
