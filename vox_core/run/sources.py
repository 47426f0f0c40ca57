"""The files of a run: its model found or fetched, data and model hashed by SHA-256.

The contract has one digest for all documents and one for all weights. The hashes here say which
file it is where one of them has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vox_core import models
from vox_core.data.checked import CheckedFile
from vox_core.data.tokenizer import templated
from vox_core.digests import CONFIG_FILE, TOKENIZER_FILES, file_sha256
from vox_core.run.folder import RunFolder


def resolve_model(
    reference: str,
    *,
    revision: str | None = None,
    template: str | Path | None = None,
    progress: models.Progress | None = None,
) -> models.LocalModel:
    """The model that `reference` names, with another chat template if one is given.

    A run of the method `full` stands for the checkpoint that it left, under the run's name.

    Args:
        template: a name of a template, or a Jinja file.

    Raises:
        ModelError: the reference names nothing, or not a model that vox can use.
        ConfigError: a catalog or `vox.toml` is wrong, or there is no such template.
        DataError: D005, the template cannot be used.
        StorageError: the disk is full, or an I/O error.
    """
    trained = RunFolder(Path(reference)).model
    model = models.resolve(str(trained or reference), revision=revision, progress=progress)
    if trained:
        model = replace(model, id=trained.resolve().parent.name)
    if template is None:
        return model
    folder, notes = templated(model.path, template)
    return replace(model, templated=folder, notes=notes)


class Fetching:
    """Passes progress on; `happened` once a model was fetched or converted."""

    def __init__(self, progress: models.Progress | None) -> None:
        self._progress, self.happened = progress, False

    def __call__(self, what: str, done: int, total: int) -> None:
        self.happened = True
        if self._progress:
            self._progress(what, done, total)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file when it was read; `state` is its size and its time of change."""

    path: Path
    sha256: str
    state: tuple[int, int]

    def unchanged(self) -> bool:
        """Whether it looks as it did."""
        try:
            return _state(self.path) == self.state
        except OSError:
            return False


Sources = Mapping[str, Sequence[SourceFile]]
"""What it is for ("data", "valid", "weights", "tokenizer", "config") -> files."""


def data_files(checked: Iterable[CheckedFile]) -> list[SourceFile]:
    """Data files, as they were when they were read."""
    return [SourceFile(f.on_disk.resolve(), f.sha256, f.state[:2]) for f in checked]


def model_files(
    folder: Path, weights: Iterable[str], tokenizer: Path
) -> dict[str, list[SourceFile]]:
    """The files that a model's digests cover.

    Args:
        tokenizer: the folder of its tokenizer.
    """
    there = [name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    named = {
        "weights": [folder / name for name in sorted(weights)],
        "tokenizer": [tokenizer / name for name in sorted(there)],
        "config": [folder / CONFIG_FILE],
    }
    return {
        what: [SourceFile(path.resolve(), file_sha256(path), _state(path)) for path in paths]
        for what, paths in named.items()
    }


def to_json(sources: Sources) -> dict[str, list[dict[str, str]]]:
    """As `plan.json` keeps them."""
    return {
        what: [{"path": str(file.path), "sha256": file.sha256} for file in some]
        for what, some in sources.items()
    }


def other_files(
    recorded: Mapping[str, Any], sources: Sources, what: str, since: str = "the run began"
) -> list[str]:
    """In words, which files of one kind are not those that were recorded.

    A file that lies elsewhere, with the same bytes, is the same file.
    """
    was = {each["path"]: each["sha256"] for each in recorded.get(what, ())}
    now = {str(file.path): file.sha256 for file in sources.get(what, ())}
    gone = [path for path, sha256 in was.items() if sha256 not in now.values()]
    new = [path for path, sha256 in now.items() if sha256 not in was.values()]
    return [
        *(f"{path} has changed since {since}" for path in gone if path in now),
        *(f"{path} is not among the files any more" for path in gone if path not in now),
        *(f"{path} was not among the files" for path in new if path not in was),
    ]


def changed(sources: Sources) -> list[Path]:
    """Files that do not look as they did when they were read."""
    return [file.path for some in sources.values() for file in some if not file.unchanged()]


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
