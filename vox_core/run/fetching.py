"""Whether a model had to be fetched or converted before it could be used."""

from __future__ import annotations

from vox_core import models


class Fetching:
    """Passes progress on, and remembers that there was some."""

    def __init__(self, progress: models.Progress | None) -> None:
        self._progress, self.happened = progress, False

    def __call__(self, what: str, done: int, total: int) -> None:
        self.happened = True
        if self._progress:
            self._progress(what, done, total)
