"""Links in a folder that lead out of it.

A folder of a model or an adapter is what somebody else packed. A link in it could make any file of
this machine a part of the model, so none is followed out of the folder: only the hub's own cache
lays a snapshot out as links, into the `blobs` beside it and those that repositories share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_TEMPLATES = "additional_chat_templates"  # the one folder within a model that is read


def strays(folder: Path) -> list[str]:
    """What lies in `folder` as a link to somewhere else, each with where it leads.

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
    """Where the links of a snapshot lead: HUB/models--O--N/snapshots/COMMIT -> …/blobs/DIGEST."""
    repository = home.parent.parent
    if home.parent.name == "snapshots" and repository.name.startswith("models--"):
        yield repository / "blobs"
        yield repository.parent / "blobs"
