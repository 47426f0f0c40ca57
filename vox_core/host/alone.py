"""One change of a Python environment at a time, whoever makes it and by whatever path they come.

The lock is a file in the environment itself, below its real prefix, as uv has one there: not in a
cache, which each user has of their own. It stays when it is released; a file that is deleted while
another process waits for it locks nothing. The operating system releases it when a process ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.errors import InputError
from vox_core.host.environment import Environment

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK_NAME = ".vox-lock"
_MODE = 0o666  # empty, and every user of the environment has to be able to take it


@contextmanager
def alone(environment: Environment) -> Iterator[None]:
    """Two at once would each take the other's packages for leftovers.

    Raises:
        InputError: I011, another process is at it.
        OSError: no lock file can be made.
    """
    lock = _taken(environment)
    try:
        yield
    finally:
        lock.release()


def _taken(environment: Environment) -> BaseFileLock:
    from filelock import FileLock, Timeout

    first, second = (FileLock(place / LOCK_NAME, mode=_MODE) for place in _places(environment))
    try:
        return _first_of(first, second)
    except Timeout as error:
        raise InputError(
            "I011",
            "another vox is changing this Python environment",
            where=environment,
            remedy="wait until it is done, and run again",
        ) from error


def _first_of(lock: BaseFileLock, fallback: BaseFileLock) -> BaseFileLock:
    try:
        lock.acquire(timeout=0)
    except TimeoutError:  # an OSError as well
        raise
    except OSError:
        fallback.acquire(timeout=0)
        return fallback
    return lock


def _places(environment: Environment) -> tuple[Path, Path]:
    """The prefix, or the packages where only those may be written, as in a shared `/usr/local`."""
    return environment.prefix.resolve(), environment.site_packages.resolve()
