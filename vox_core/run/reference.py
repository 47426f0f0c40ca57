"""Resolve a reference to a base model, or to an adapter and its base.

A reference is a run folder, a folder saved by PEFT or mlx-lm, an adapter on the hub, the name of a
promoted model, or anything that `models.resolve` knows (merged folders included). A run of the
method `full` is a model. The base of an adapter is found by what the adapter's manifest says and
held against it: another base is refused, not tried. A name such as `production` is
`registry/NAME.json` in the current folder, which `vox promote` writes.

A run keeps the SHA-256 of its data and model files (`Sources`). The contract has one digest for all
documents and one for all weights. These hashes say which file it is where one of them has changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from vox_core import bounded_json, files, models
from vox_core.adapter.mlx import is_mlx_folder, read_mlx_adapter
from vox_core.adapter.peft import CONFIG, read_adapter
from vox_core.adapter.targets import BASE, linear_modules, parameter_names, require_fit
from vox_core.contract import AdapterState, DType, Floats, ModuleShape, Quant
from vox_core.data.checked import CheckedFile, SourceFile
from vox_core.data.tokenizer import TEMPLATE, templated
from vox_core.digests import CONFIG_FILE, TOKENIZER_FILES, folder_digest
from vox_core.errors import AdapterError, ModelError, command
from vox_core.run.folder import CHECKPOINTS, MANIFEST, PLAN, PREFLIGHT, RunFolder
from vox_core.run.plan import has_tied_head
from vox_core.weights import Weights, open_weights
from vox_formats.mlx_adapter import MlxBase


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


Sources = Mapping[str, Sequence[SourceFile]]
"""What it is for ("data", "valid", "weights", "tokenizer", "config") -> files."""


def data_files(checked: Iterable[CheckedFile]) -> list[SourceFile]:
    """Data files, as they were when they were read."""
    return [replace(file.origin, path=file.origin.path.resolve()) for file in checked]


def model_files(
    folder: Path, weights: Iterable[str], tokenizer: Path
) -> dict[str, list[SourceFile]]:
    """The files that a model's digests cover; `tokenizer` is the folder of its tokenizer."""
    there = [name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    named = {
        "weights": [folder / name for name in sorted(weights)],
        "tokenizer": [tokenizer / name for name in sorted(there)],
        "config": [folder / CONFIG_FILE],
    }
    return {
        what: [SourceFile.of(path.resolve()) for path in paths] for what, paths in named.items()
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


def changed_files(sources: Sources) -> list[Path]:
    """Files that do not look as they did when they were read."""
    return [file.path for some in sources.values() for file in some if not file.unchanged()]


NO_ADAPTER = "none"
REGISTRY = Path("registry")
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A base, and an adapter that was checked to belong to it.

    Args:
        modules: every linear module of the base.
        parameters: parameter name -> tensor name, of the base.
        manifest: the `vox_adapter.json` of the adapter, or of the run whose adapter was left out;
            empty if vox did not save it.
        folder: of the adapter.
    """

    base: models.LocalModel
    weights: Weights
    modules: dict[str, ModuleShape]
    parameters: dict[str, str]
    adapter: AdapterState | None
    manifest: dict[str, Any]
    folder: Path | None = None

    @property
    def quant(self) -> Quant:
        """Quantisation of the base: that of its files, or else of the run that trained on it."""
        if self.weights.quant != "none":
            return self.weights.quant
        said = self.manifest.get("quant")
        return next((quant for quant in get_args(Quant) if quant == said), "none")

    def digest(self) -> str:
        """Return the SHA-256 of the base's weights and of the adapter, in hex."""
        base = folder_digest(self.base.path)
        return base if self.adapter is None else adapter_digest(base, self.adapter)

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


def adapter_digest(base: str, adapter: AdapterState) -> str:
    """Return the SHA-256 of a digest and everything of an adapter that decides results, in hex."""
    sha256, tensors = hashlib.sha256(base.encode()), adapter.tensors()
    for name in sorted(tensors):
        value = tensors[name]
        sha256.update(f"{name} {value.shape}".encode())
        sha256.update(value.tobytes())
    for path in sorted(adapter.modules):
        sha256.update(f"{path} {adapter.scale(path)}".encode())
    return sha256.hexdigest()


def resolve_reference(
    reference: str,
    *,
    base: str | None = None,
    adapter: str | None = None,
    revision: str | None = None,
    template: str | Path | None = None,
    progress: models.Progress | None = None,
) -> ModelReference:
    """Find base and adapter.

    Args:
        base: base model to use instead of the one the adapter names; `revision` is of it.
        adapter: adapter to use instead, or `none`.
        template: chat template to use instead of the adapter's.

    Raises:
        AdapterError: A001 to A003.
        ModelError: the base cannot be found or used; M009, of a promoted model.
    """
    current = promoted(reference)
    place = current["reference"] if current else reference
    named = _adapter_folder(adapter_path(place, progress))
    chosen = named
    if adapter is not None:
        chosen = None if adapter == NO_ADAPTER else adapter_path(adapter, progress)
    template = template or _template(chosen or named)
    find = partial(resolve_model, template=template, progress=progress)
    model = _base_model(named, base, revision, find) if named else find(place)
    weights = open_weights(model.path)
    source = ModelReference(
        base=model,
        weights=weights,
        modules=linear_modules(weights.tensors, model.model_type),
        parameters=parameter_names(weights.tensors, model.model_type),
        adapter=None,
        manifest=_manifest(told) if (told := chosen or named) else {},
    )
    if chosen:
        adapted = read_adapter_folder(chosen, source.mlx_base)
        _require_belonging(replace(source, adapter=adapted), chosen)
        saved = {name: value for name, value in adapted.saved.items() if BASE not in name}
        source = replace(source, adapter=replace(adapted, saved=saved), folder=chosen)
    if current and not (base or adapter) and (digest := source.digest()) != current["digest"]:
        there = f"base and adapter with the SHA-256 {digest[:12]}…"
        raise _unusable(reference, there, f"{current['digest'][:12]}…")
    return source


def adapter_path(reference: str, progress: models.Progress | None = None) -> Path:
    """Return the path that `reference` is; an adapter on the hub is downloaded."""
    return models.adapter_on_hub(reference, progress) or Path(reference)


def promoted(name: str) -> dict[str, str] | None:
    """Return what a name stands for, with `reference` and `digest`; None if there is no such name,
    or a file or folder is called so.

    Raises:
        ModelError: M009, the registry cannot be read.
    """
    path = REGISTRY / f"{name}.json"
    if not NAME.fullmatch(name) or Path(name).exists() or not path.exists():
        return None
    try:
        found: Any = bounded_json.read(path)
    except (OSError, ValueError) as error:
        raise _unusable(name, error, "the file as `vox promote` wrote it") from error
    match found:
        case {"current": {"reference": str(), "digest": str()} as current}:
            return dict(current)
    raise _unusable(name, "no current model", "a reference and a digest")


def _unusable(name: str, found: object, expected: str) -> ModelError:
    return ModelError(
        "M009",
        f"the promoted model {name} has changed, or its registry has",
        where=REGISTRY / f"{name}.json",
        found=found,
        expected=expected,
        remedy=f"restore it, promote again, or {command('vox', 'registry', 'rollback', name)}",
    )


def read_adapter_folder(folder: Path, base: MlxBase, *, literal: bool = False) -> AdapterState:
    """The adapter in `folder`, whichever of the two formats it is in (A001 or A003).

    Args:
        literal: read as the format's own tool does, without vox's extensions.
    """
    if is_mlx_folder(folder):
        return read_mlx_adapter(folder, base, literal=literal)
    return read_adapter(folder)


def _adapter_folder(path: Path) -> Path | None:
    """Return `path` if it has an adapter; refuse a run without one, or a folder inside it."""
    if (path / CONFIG).is_file():
        return path
    if RunFolder(path).model:
        return None
    saved = any((path / CHECKPOINTS).glob("step-*"))
    deep = "*/*" if (path / PLAN).is_file() else "*"  # a client of `vox tinker` saves in weights/
    places = (p.parent for kind in (CONFIG, PLAN) for p in path.glob(f"{deep}/{kind}"))
    inside, found = sorted(str(place.relative_to(path)) for place in places), None
    if (path / PLAN).is_file() and saved:
        what = "the run has not ended, so it has no result yet"
        remedy = f"finish it: {command('vox', 'train', '--resume', path)}"
    elif (path / PLAN).is_file() and not inside:
        what = "the run was ended before anything was saved"
        remedy = "have its client save its weights"  # of `vox tinker`, which plans no run
        if (path / PREFLIGHT).is_file():
            remedy = f"begin it again: {command('vox', 'train', '--resume', path)}"
    elif path.is_file() and (path.parent / CONFIG).is_file():
        what, remedy = "an adapter is named by its folder", f"name the folder: {path.parent}"
        found = "a file of it"
    elif inside and not (path / "config.json").is_file():
        what = "the folder has no adapter itself, but holds some"
        found, remedy = ", ".join(dict.fromkeys(inside)), f"name one of them: {path / inside[0]}"
    else:
        return None
    raise AdapterError("A001", what, where=path, found=found, remedy=remedy)


def _template(folder: Path | None) -> Path | None:
    """The chat template in an adapter's folder, which it was trained with."""
    if folder is None or not (folder / TEMPLATE).is_file():
        return None
    return None if files.strays(folder) else folder / TEMPLATE  # refused when read


def _base_model(
    folder: Path, override: str | None, revision: str | None, find: Callable[..., models.LocalModel]
) -> models.LocalModel:
    """The base that an adapter names: by path if that is still there, else by id."""
    if override:
        return find(override, revision=revision)
    described = _base_described(folder)
    if (path := described.get("path")) and Path(path).is_dir():
        hub, licence = described.get("hub"), described.get("licence")
        hub = hub if isinstance(hub, str) else None
        return replace(find(path), id=described["id"], hub=hub, licence=licence)
    try:
        config = bounded_json.read(folder / CONFIG)
    except ValueError:  # `read_adapter` says what is wrong with the file
        config = {}
    config = config if isinstance(config, dict) else {}
    key = "model" if is_mlx_folder(folder) else "base_model_name_or_path"
    reference = described.get("id") or config.get(key)
    if not reference or not isinstance(reference, str):
        raise AdapterError(
            "A001",
            "the adapter does not say what its base model is",
            where=folder / CONFIG,
            expected="base_model_name_or_path (PEFT) or model (mlx-lm)",
            remedy="name the base with --model",
        )
    revision = described.get("revision") or config.get("revision")
    if "/" not in reference or not isinstance(revision, str):
        revision = None
    return find(reference, revision=revision)


def _base_described(folder: Path) -> dict[str, Any]:
    """Return the `base` of vox's manifest (A001 if malformed); empty without a manifest."""
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
    """Read `vox_adapter.json`; empty for an adapter that vox did not save."""
    return RunFolder(folder).read(MANIFEST) if (folder / MANIFEST).is_file() else {}


def _require_belonging(source: ModelReference, folder: Path) -> None:
    assert source.adapter is not None
    tied = has_tied_head(bounded_json.read(source.base.path / "config.json"))

    def read(name: str) -> Floats:
        return source.weights.read(source.parameters[name]).astype("f4")

    require_fit(source.adapter, source.modules, source.shapes, folder, tied=tied, read=read)
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
