"""What a reference on the command line stands for: a base model, or an adapter and its base.

A reference is a run folder, a folder saved by PEFT, or anything that `models.resolve` knows
(merged folders included). The base of an adapter is found by what the adapter's manifest says and
held against it: another base is refused, not tried.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vox_core import models
from vox_core.adapter.fit import require_fit
from vox_core.adapter.peft import CONFIG, read_adapter
from vox_core.adapter.targets import linear_modules, parameter_names
from vox_core.contract import AdapterState, ModuleShape
from vox_core.digests import folder_digest
from vox_core.errors import AdapterError
from vox_core.run.folder import CHECKPOINTS, MANIFEST, PLAN, RunFolder
from vox_core.weights import WeightFolder

NO_ADAPTER = "none"


@dataclass(frozen=True, slots=True)
class Source:
    """A base, and an adapter that was checked to belong to it.

    Args:
        modules: every linear module of the base.
        parameters: parameter name -> tensor name, of the base.
        manifest: the adapter's `vox_adapter.json`; empty if PEFT saved it.
    """

    base: models.LocalModel
    weights: WeightFolder
    modules: dict[str, ModuleShape]
    parameters: dict[str, str]
    adapter: AdapterState | None
    manifest: dict[str, Any]


def locate(
    reference: str,
    *,
    base: str | None = None,
    adapter: str | None = None,
    progress: models.Progress | None = None,
) -> Source:
    """Find base and adapter.

    Args:
        base: base model to use instead of the one the adapter names.
        adapter: adapter folder to use instead, or `none`.

    Raises:
        AdapterError: A001 to A003.
        ModelError: the base cannot be found or used.
    """
    named = _adapter_folder(Path(reference))
    model = (
        _base_model(named, base, progress)
        if named
        else models.resolve(reference, progress=progress)
    )
    chosen = {None: named, NO_ADAPTER: None}.get(adapter, Path(adapter or ""))
    weights = WeightFolder(model.path)
    source = Source(
        base=model,
        weights=weights,
        modules=linear_modules(weights.tensors, model.model_type),
        parameters=parameter_names(weights.tensors, model.model_type),
        adapter=read_adapter(chosen) if chosen else None,
        manifest=_manifest(chosen) if chosen else {},
    )
    if chosen:
        _require_belonging(source, chosen)
    return source


def _adapter_folder(folder: Path) -> Path | None:
    if (folder / CONFIG).is_file():
        return folder
    if not (folder / PLAN).is_file():
        return None
    saved = any((folder / CHECKPOINTS).glob("step-*"))
    raise AdapterError(
        "A001",
        "the run has not ended, so it has no adapter yet"
        if saved
        else "the run was ended before anything was saved",
        where=folder,
        remedy=f"finish it: vox train --resume {folder}"
        if saved
        else f"remove it and train again: rm -r {folder}",
    )


def _base_model(
    folder: Path, override: str | None, progress: models.Progress | None
) -> models.LocalModel:
    """The base that an adapter names: by path if that is still there, else by id."""
    if override:
        return models.resolve(override, progress=progress)
    described = _base_described(folder)
    if (path := described.get("path")) and Path(path).is_dir():
        found = models.resolve(path, progress=progress)
        return replace(found, id=described["id"], licence=described.get("licence"))
    reference = described.get("id") or _peft_said(folder, "base_model_name_or_path")
    if not reference:
        raise AdapterError(
            "A001",
            "the adapter does not say what its base model is",
            where=folder / CONFIG,
            expected="base_model_name_or_path",
            remedy="name the base with --model",
        )
    revision = described.get("revision") or _peft_said(folder, "revision")
    revision = revision if "/" in reference else None
    return models.resolve(reference, revision=revision, progress=progress)


def _peft_said(folder: Path, key: str) -> str | None:
    try:
        value = json.loads((folder / CONFIG).read_bytes()).get(key)
    except (ValueError, AttributeError):
        return None  # `read_adapter` says what is wrong with the file
    return value if isinstance(value, str) else None


def _base_described(folder: Path) -> dict[str, Any]:
    """The `base` of vox's manifest; empty for an adapter that PEFT saved.

    Raises:
        AdapterError: A001, it does not say what vox writes there.
    """
    base = _manifest(folder).get("base", {})
    if base and not (isinstance(base, dict) and isinstance(base.get("id"), str)):
        raise AdapterError(
            "A001",
            "the adapter's manifest does not say what its base model is",
            where=folder / MANIFEST,
            found=base,
            expected="an object with id, path, revision and weights_digest",
            remedy="name the base with --model",
        )
    return dict(base)


def _manifest(folder: Path) -> dict[str, Any]:
    """What vox wrote of the adapter; empty for one that PEFT saved."""
    return RunFolder(folder).read(MANIFEST) if (folder / MANIFEST).is_file() else {}


def _require_belonging(source: Source, folder: Path) -> None:
    assert source.adapter is not None
    stored = source.weights.tensors
    shapes = {name: stored[tensor].shape for name, tensor in source.parameters.items()}
    require_fit(source.adapter, source.modules, shapes, folder)
    trained_on = _base_described(folder).get("weights_digest")
    if trained_on and trained_on != (found := folder_digest(source.base.path)):
        raise AdapterError(
            "A002",
            "the adapter was trained on another base model, or that has changed since",
            where=folder,
            found=f"{source.base.id}, weights {found[:12]}…",
            expected=f"{source.manifest['base']['id']}, weights {trained_on[:12]}…",
            remedy="name the base model it was trained on, with --model",
        )
