"""The adapter that training starts from (`--adapter`), instead of a seeded one.

Settings that the user did not give (base model, method, rank, alpha, modules) become the adapter's;
the others have to be the same. The run folder keeps a copy, so that a resume does not depend on the
folder that was named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files, models
from vox_core.adapter.peft import write_adapter
from vox_core.adapter.targets import ALL_LINEAR, leaf_names, select_targets
from vox_core.contract import AdapterState, ExecutionPlan, ModuleShape
from vox_core.data.tokenizer import TEMPLATE
from vox_core.errors import AdapterError, ConfigError
from vox_core.run.folder import MANIFEST, START, run_meant
from vox_core.run.reference import ModelReference, adapter_path, resolve_reference

if TYPE_CHECKING:
    from vox_core.config import TrainSettings

REFERENCE = "reference"
"""Name of the starting adapter in a `Model`, as the reference of an objective."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A starting adapter, checked to belong to its base; `name` is as it was given."""

    name: str
    source: ModelReference
    adapter: AdapterState

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the method and of each tensor with its scale; not of the files."""
        sha256 = hashlib.sha256(self.adapter.method.encode())
        for path in sorted(self.adapter.modules):
            sha256.update(f"\n{path} {float(self.adapter.modules[path].alpha)!r}".encode())
        for name, value in sorted(self.adapter.tensors().items()):
            sha256.update(f"\n{name} {value.shape}\n".encode())
            sha256.update(value.astype("<f4").tobytes())
        return sha256.hexdigest()

    def adopted(self, settings: TrainSettings) -> TrainSettings:
        """Return settings with the adapter's values where the user gave none."""
        given = settings.model_fields_set
        made = settings.model_copy(
            update={name: value for name, value in self._values().items() if name not in given}
        )
        if "model" in given:
            return made
        made = made.model_copy(update={"model": self.source.base.id})
        made.model_fields_set.discard("model")  # the copy in the run folder names it
        return made

    def write(self, run: Path, about: dict[str, Any]) -> None:
        """Keep a copy in a run folder.

        Args:
            about: the `base` of the run's `vox_adapter.json`.
        """
        base, folder = self.source.base, run / START
        if folder.exists():
            return
        with files.atomic_folder(folder) as made:
            write_adapter(
                made, self.adapter, base=base.hub or str(base.path), modules=self.source.modules
            )
            files.write_json(made / MANIFEST, {"format": "vox-adapter/1", "base": about})
            if base.templated:
                files.write_bytes(made / TEMPLATE, (base.templated / TEMPLATE).read_bytes())

    def _values(self) -> dict[str, Any]:
        rank, alpha = next(iter(_sizes(self.adapter)), (1, 1.0))
        return {
            "method": self.adapter.method,
            "rank": rank,
            "alpha": alpha,
            "targets": _targets(self.adapter, self.source.modules),
            "modules_to_save": tuple(_owners(self.adapter)),
        }


def starting_adapter(
    settings: TrainSettings, progress: models.Progress | None = None
) -> Start | None:
    """Read the adapter of the settings, and find its base; None without one.

    Raises:
        AdapterError: A001 to A003; it cannot be read, belongs to another base, or has several ranks
            or alphas.
        ModelError: the base cannot be found or used.
    """
    if settings.adapter is None:
        return None
    source, adapter = find_adapter(
        settings.adapter,
        base=settings.model if "model" in settings.model_fields_set else None,
        revision=settings.revision,
        template=settings.template,
        progress=progress,
    )
    _require_uniform(adapter, settings.adapter)
    return Start(settings.adapter, source, adapter)


def find_adapter(reference: str, **how: Any) -> tuple[ModelReference, AdapterState]:
    """Find an adapter and its base as `resolve_reference` does; A001 if there is none."""
    folder, found = adapter_path(reference, how.get("progress")), "no such folder"
    if folder.exists():
        source = resolve_reference(str(folder), **how)
        if source.adapter is not None:
            return source, source.adapter
        found = "a model"
    raise AdapterError(
        "A001",
        "there is no adapter to start from",
        where=reference,
        found=found,
        expected="a run, a folder saved by PEFT or mlx-lm, or an adapter on the hub",
        remedy=f"{run_meant(reference)}name a model with --model, and an adapter with --adapter",
    )


def require_same_adapter(adapter: AdapterState, plan: ExecutionPlan, where: object) -> None:
    """Refuse an adapter that the plan's settings do not describe (C004, naming each setting)."""
    if faults := [*_conflicts(adapter, plan)]:
        what = "settings and starting adapter contradict each other"
        remedy = "leave these settings out: they are the adapter's"
        raise ConfigError("C004", what, where=where, faults=faults, remedy=remedy)


def _conflicts(adapter: AdapterState, plan: ExecutionPlan) -> Iterator[str]:
    spec = plan.contract.adapter
    if spec.method != adapter.method:
        yield f"--method {spec.method}: the adapter is {adapter.method}"
    for rank, alpha in sorted(_sizes(adapter)):
        if rank != spec.rank:
            yield f"--rank {spec.rank}: the adapter has rank {rank}"
        if alpha != spec.alpha:
            yield f"--alpha {spec.alpha:g}: the adapter has alpha {alpha:g}"
    if {*plan.modules} != {*adapter.modules}:
        asked = " ".join(spec.targets)
        has = ", ".join(leaf_names(adapter.modules))
        count = f"{len(plan.modules)} modules, and the adapter has {len(adapter.modules)}: {has}"
        yield f"--targets {asked}: {count}"
    if {*plan.saved} != {*adapter.saved}:
        asked, has = " ".join(spec.modules_to_save) or "none", ", ".join(_owners(adapter)) or "none"
        yield f"--modules-to-save {asked}: the adapter has {has}"


def _require_uniform(adapter: AdapterState, where: str) -> None:
    if len(sizes := _sizes(adapter)) > 1:
        raise AdapterError(
            "A003",
            "training cannot start from an adapter with several ranks or alphas",
            where=where,
            found=", ".join(f"rank {rank} with alpha {alpha:g}" for rank, alpha in sorted(sizes)),
            remedy="merge it into its base with vox merge, and train on the result",
        )


def _sizes(adapter: AdapterState) -> set[tuple[int, float]]:
    return {(module.rank, module.alpha) for module in adapter.modules.values()}


def _targets(adapter: AdapterState, linear: dict[str, ModuleShape]) -> tuple[str, ...]:
    """The shortest `--targets` that select the adapter's modules."""
    short = [(ALL_LINEAR,), tuple(leaf_names(adapter.modules))]
    return next(
        (names for names in short if {*select_targets(linear, names)} == {*adapter.modules}),
        tuple(sorted(adapter.modules)),
    )


def _owners(adapter: AdapterState) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in adapter.saved})
