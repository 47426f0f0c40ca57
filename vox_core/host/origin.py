"""Where a distribution comes from: addresses of archives and folders, and what it says itself.

Nothing here asks an installer or an index.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_HEAD_SECONDS = 5.0


def local_path(url: str) -> Path | None:
    """The file or folder of a `file:` URL; None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def file_name(source: str) -> str:
    """The file at the end of a path or an address, whatever query follows it."""
    return unquote(urlsplit(source).path).rpartition("/")[2]


def size_of(url: str) -> int | None:
    """Of an archive, in bytes; of a remote one the server's word, if it gives it."""
    if (path := local_path(url)) is not None:
        return path.stat().st_size if path.is_file() else None
    return _content_length(url)


def origin(distribution: str) -> dict[str, Any]:
    """What direct_url.json (PEP 610) says about an installation; empty if it is from an index."""
    with suppress(metadata.PackageNotFoundError, ValueError):
        text = metadata.distribution(distribution).read_text("direct_url.json")
        document = json.loads(text or "{}")
        return document if isinstance(document, dict) else {}
    return {}


def is_editable(distribution: str) -> bool:
    """Whether the installation is a link to a checkout."""
    return bool(origin(distribution).get("dir_info", {}).get("editable"))


def _content_length(url: str) -> int | None:
    from urllib.request import Request, urlopen

    if urlsplit(url).scheme not in ("http", "https"):
        return None
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_HEAD_SECONDS) as answer:
            length = answer.headers.get("Content-Length")
    except (OSError, ValueError):  # a size is a courtesy; the installer has its own connection
        return None
    return int(length) if length and length.isdigit() else None
