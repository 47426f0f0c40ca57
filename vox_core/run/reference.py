"""What a reference on the command line stands for: a base model, or an adapter and its base.

A reference is a run folder, a folder saved by PEFT or mlx-lm, or anything that `models.resolve`
knows (merged folders included). The base of an adapter is found by what the adapter's manifest says
and held against it: another base is refused, not tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from vox_core import bounded_json, links, models
from vox_core.adapter.mlx import is_mlx_folder, read_mlx_adapter
from vox_core.adapter.peft import CONFIG, read_adapter
from vox_core.adapter.targets import linear_modules, parameter_names, require_fit
from vox_core.contract import AdapterState, DType, ModuleShape, Quant
from vox_core.data.templated import TEMPLATE
from vox_core.digests import folder_digest
from vox_core.errors import AdapterError, command
from vox_core.run.folder import CHECKPOINTS, MANIFEST, PLAN, RunFolder
from vox_core.run.sources import resolve_model
from vox_core.weights import Weights, open_weights
from vox_formats.mlx_adapter import MlxBase

NO_ADAPTER = "none"


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A base, and an adapter that was checked to belong to it.

    Args:
        modules: every linear module of the base.
        parameters: parameter name -> tensor name, of the base.
        manifest: the `vox_adapter.json` of the adapter, or of the run whose adapter was left out;
            empty if vox did not save it.
    """

    base: models.LocalModel
    weights: Weights
    modules: dict[str, ModuleShape]
    parameters: dict[str, str]
    adapter: AdapterState | None
    manifest: dict[str, Any]

    @property
    def quant(self) -> Quant:
        """What the base is quantised to: by its files, or else by the run that trained on it."""
        if self.weights.quant != "none":
            return self.weights.quant
        said = self.manifest.get("quant")
        return next((quant for quant in get_args(Quant) if quant == said), "none")

    @property
    def trained_in(self) -> DType | None:
        """The dtype that the run computed in; None where no manifest says it."""
        backend = self.manifest.get("backend")
        said = backend.get("dtype") if isinstance(backend, dict) else None
        return next((dtype for dtype in get_args(DType) if dtype == said), None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape as stored, of the base."""
        return {name: self.weights.tensors[t].shape for name, t in self.parameters.items()}

    @property
    def mlx_base(self) -> MlxBase:
        """The base, as far as mlx-lm's adapter files depend on it."""
        return MlxBase(self.base.model_type, self.modules, self.shapes)


def resolve_reference(
    reference: str,
    *,
    base: str | None = None,
    adapter: str | None = None,
    progress: models.Progress | None = None,
) -> ModelReference:
    """Find base and adapter.

    Args:
        base: base model to use instead of the one the adapter names.
        adapter: adapter folder to use instead, or `none`.

    Raises:
        AdapterError: A001 to A003.
        ModelError: the base cannot be found or used.
    """
    named = _adapter_folder(Path(reference))
    chosen = {None: named, NO_ADAPTER: None}.get(adapter, Path(adapter or ""))
    template = _template(chosen or named)
    model = (
        _base_model(named, base, template, progress)
        if named
        else resolve_model(reference, template=template, progress=progress)
    )
    weights = open_weights(model.path)
    source = ModelReference(
        base=model,
        weights=weights,
        modules=linear_modules(weights.tensors, model.model_type),
        parameters=parameter_names(weights.tensors, model.model_type),
        adapter=None,
        manifest=_manifest(told) if (told := chosen or named) else {},
    )
    if not chosen:
        return source
    found = replace(source, adapter=read_adapter_folder(chosen, source.mlx_base))
    _require_belonging(found, chosen)
    return found


def read_adapter_folder(folder: Path, base: MlxBase) -> AdapterState:
    """The adapter in `folder`, whichever of the two formats it is in.

    Raises:
        AdapterError: A001 or A003.
    """
    return read_mlx_adapter(folder, base) if is_mlx_folder(folder) else read_adapter(folder)


def _adapter_folder(folder: Path) -> Path | None:
    if (folder / CONFIG).is_file():
        return folder
    if not (folder / PLAN).is_file():
        _refuse_the_place_beside(folder)
        return None
    saved = any((folder / CHECKPOINTS).glob("step-*"))
    raise AdapterError(
        "A001",
        "the run has not ended, so it has no adapter yet"
        if saved
        else "the run was ended before anything was saved",
        where=folder,
        remedy=f"finish it: {command('vox', 'train', '--resume', folder)}"
        if saved
        else "train again, with another --out",
    )


def _refuse_the_place_beside(path: Path) -> None:
    """Tell a file inside an adapter's folder, or the folder around runs, from a model."""
    if path.is_file() and (path.parent / CONFIG).is_file():
        raise AdapterError(
            "A001",
            "an adapter is named by its folder",
            where=path,
            found="a file of it",
            remedy=f"name the folder: {path.parent}",
        )
    if not path.is_dir() or (path / "config.json").is_file():
        return
    inside = sorted(p.parent.name for kind in (CONFIG, PLAN) for p in path.glob(f"*/{kind}"))
    if inside:
        raise AdapterError(
            "A001",
            "the folder is no run and no adapter, but holds some",
            where=path,
            found=", ".join(dict.fromkeys(inside)),
            remedy=f"name one of them: {path / inside[0]}",
        )


def _template(folder: Path | None) -> Path | None:
    """The chat template in an adapter's folder, which it was trained with."""
    if folder is None or not (folder / TEMPLATE).is_file():
        return None
    return None if links.strays(folder) else folder / TEMPLATE  # refused when read


def _base_model(
    folder: Path, override: str | None, template: Path | None, progress: models.Progress | None
) -> models.LocalModel:
    """The base that an adapter names: by path if that is still there, else by id."""
    if override:
        return resolve_model(override, template=template, progress=progress)
    described = _base_described(folder)
    if (path := described.get("path")) and Path(path).is_dir():
        found = resolve_model(path, template=template, progress=progress)
        hub = described.get("hub")
        found = replace(found, hub=hub if isinstance(hub, str) else None)
        return replace(found, id=described["id"], licence=described.get("licence"))
    reference = described.get("id") or _config_said(
        folder, "model" if is_mlx_folder(folder) else "base_model_name_or_path"
    )
    if not reference:
        raise AdapterError(
            "A001",
            "the adapter does not say what its base model is",
            where=folder / CONFIG,
            expected="base_model_name_or_path (PEFT) or model (mlx-lm)",
            remedy="name the base with --model",
        )
    revision = described.get("revision") or _config_said(folder, "revision")
    revision = revision if "/" in reference else None
    return resolve_model(reference, revision=revision, template=template, progress=progress)


def _config_said(folder: Path, key: str) -> str | None:
    try:
        value = bounded_json.read(folder / CONFIG).get(key)
    except (ValueError, AttributeError):
        return None  # `read_adapter` says what is wrong with the file
    return value if isinstance(value, str) else None


def _base_described(folder: Path) -> dict[str, Any]:
    """The `base` of vox's manifest; empty for one that vox did not save.

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
    """What vox wrote of the adapter; empty for one that vox did not save."""
    return RunFolder(folder).read(MANIFEST) if (folder / MANIFEST).is_file() else {}


def _require_belonging(source: ModelReference, folder: Path) -> None:
    assert source.adapter is not None
    require_fit(source.adapter, source.modules, source.shapes, folder)
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
