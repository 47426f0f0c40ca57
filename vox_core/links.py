"""Detect links that lead out of a model or adapter folder.

Model and adapter folders come from others. A link could make any file of this machine part of the
model, so links out of the folder are refused. The exception is a snapshot in the hub's cache, whose
links lead into the `blobs` folders beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_TEMPLATES = "additional_chat_templates"  # the one folder within a model that is read


def strays(folder: Path) -> list[str]:
    """List the links in `folder` that lead out of it, each with its target.

    Raises:
        OSError: the folder cannot be listed.
    """
    home = folder.resolve()
    homes = (home, *_blobs(home))
    return [
        f"{path.relative_to(folder)}: a link to {target}"
        for path in _links(folder)
        if not any((target := path.resolve()).is_relative_to(place) for place in homes)
    ]


def _links(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            yield path
        elif path.name == _TEMPLATES and path.is_dir():
            yield from _links(path)


def _blobs(home: Path) -> Iterator[Path]:
    """Return the folders that a snapshot's links may lead to: HUB/models--O--N/snapshots/COMMIT ->
    …/blobs."""
    repository = home.parent.parent
    if home.parent.name == "snapshots" and repository.name.startswith("models--"):
        yield repository / "blobs"
        yield repository.parent / "blobs"
