"""Download a model from the hub, through `huggingface_hub`.

Only files that vox reads are downloaded: no pickles, no code, no sub-folders.
`huggingface_hub` honours `HF_HUB_OFFLINE`, `HF_HOME` and the user's token; vox neither
reads nor prints the token.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files
from vox_core.errors import ModelError, VoxError
from vox_core.models.folder import ADAPTER

if TYPE_CHECKING:
    from vox_core.models import Progress

NO_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README.md")
WANTED = ("*.safetensors", *NO_WEIGHTS)
# Sub-folders hold other formats; `consolidated` is the same weights in Mistral's layout.
UNWANTED = ("*/*", "consolidated*.safetensors")


def is_hub_id(reference: str) -> bool:
    """Whether `reference` has the form owner/name."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", reference, re.ASCII))


def download(
    repository: str, revision: str | None, report: Progress, wanted: Sequence[str] = WANTED
) -> Path:
    """Return the snapshot folder of `repository`, named by its commit; downloaded if needed.

    Args:
        wanted: patterns of names; other files are not downloaded.

    Raises:
        ModelError: M001, no such repository or revision; M007, the download failed.
        StorageError: the disk is full, or an I/O error.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(UNWANTED),
            tqdm_class=_bar(report),
        )
    except (HFValidationError, ConnectionFailure, HfHubHTTPError, OSError) as error:
        raise _explain(error, repository, revision) from error
    return Path(folder)


def download_adapter(repository: str, report: Progress) -> Path | None:
    """Return the snapshot folder of a repository with an adapter; None of any other.

    Raises:
        ModelError, StorageError: as of `download`.
    """
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", ADAPTER)
    kept = [isinstance(try_to_load_from_cache(repository, name), str) for name in names]
    if kept == [True, False]:  # a model that was downloaded before
        return None
    folder = download(repository, None, report, names)
    return download(repository, None, report) if (folder / ADAPTER).is_file() else None


def _explain(error: Exception, repository: str, revision: str | None) -> VoxError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    match error:
        case errors.GatedRepoError():
            code, found = "M007", "the repository is gated"
            remedy = f"accept its terms at {page}, then log in with `hf auth login`"
        case errors.RevisionNotFoundError():
            code, found, remedy = "M001", "no such revision", f"see {page}"
        case errors.RepositoryNotFoundError() | errors.HFValidationError():
            code, found = "M001", "no such repository, or a private one"
            remedy = "check the spelling; for a private repository log in with `hf auth login`"
        case errors.LocalEntryNotFoundError() if constants.is_offline_mode():
            code, found = "M007", "HF_HUB_OFFLINE is set, and the model is not whole in the cache"
            remedy = "unset HF_HUB_OFFLINE, or give a folder that holds the model"
        case OSError(errno=int()):
            return files.storage_error(error, Path(repository))
        case _:
            code, found = "M007", _first_line(error)
            remedy = (
                "check the connection and run again (what was fetched is kept), or give a folder"
            )
    return ModelError(
        code,
        "the hub has no such model" if code == "M001" else "the model could not be downloaded",
        where=repository if revision is None else f"{repository}, revision {revision}",
        found=found,
        remedy=remedy,
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    first, *_ = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {first}"


def _bar(report: Progress) -> type[Any]:
    """Return a progress bar class that draws nothing and reports the bytes on disk."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The hub has a bar for files, one for bytes received and one for bytes written.
            description = str(kwargs.get("desc", ""))
            self.counts = kwargs.get("unit") == "B" and description != "Downloading bytes"
            quiet = {**kwargs, "file": io.StringIO(), "disable": False}
            super().__init__(*args, **quiet)  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.counts:
                report("downloading", int(self.n), int(self.total or 0))

    return Bar
