"""Adapters and training state, in a form common to all backends.

Shape legend: R adapter rank, I input features, O output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from vox_core.contract.batch import Floats
from vox_core.contract.spec import Method

V = TypeVar("V")


class LazyMapping(Mapping[str, V]):
    """Tensors by name, each read on access and not kept.

    So a whole model's state crosses the seam without a second copy in memory.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], V]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> V:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A module's update: `scale * B_OR @ A_RI`, float32, and with DoRA its magnitude."""

    A_RI: Floats
    B_OR: Floats
    alpha: float
    magnitude_O: Floats | None = None

    @property
    def rank(self) -> int:
        return int(self.A_RI.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class AdapterState:
    """An adapter in vox's canonical form, or the trained weights of a model.

    Args:
        method: `lora`, `rslora`, `dora` or `full`.
        modules: module path in the Hugging Face model -> its update; empty with `full`.
        saved: parameter name -> whole float32 tensor, for `modules_to_save`; with `full` every
            trained parameter, a tied one once, under the name of the embedding.
    """

    method: Method
    modules: Mapping[str, LowRank]
    saved: Mapping[str, Floats] = field(default_factory=dict)

    def scale(self, path: str) -> float:
        """alpha / r; alpha / sqrt(r) for rsLoRA."""
        module = self.modules[path]
        return module.alpha / (math.sqrt(module.rank) if self.method == "rslora" else module.rank)

    def tensors(self) -> Mapping[str, Floats]:
        """Every trained tensor by its canonical name; optimizer state uses the same names."""
        if self.method == "full":
            return self.saved
        named: dict[str, Floats] = {}
        for path, module in self.modules.items():
            named[f"{path}.lora_A.weight"] = module.A_RI
            named[f"{path}.lora_B.weight"] = module.B_OR
            if module.magnitude_O is not None:
                named[f"{path}.lora_magnitude_vector"] = module.magnitude_O
        return {**named, **self.saved}

    def with_tensors(self, named: Mapping[str, Floats]) -> AdapterState:
        """Return the same adapter with other values: the inverse of `tensors`."""
        if self.method == "full":
            return replace(self, saved=named)
        modules = {
            path: replace(
                module,
                A_RI=named[f"{path}.lora_A.weight"],
                B_OR=named[f"{path}.lora_B.weight"],
                magnitude_O=named.get(f"{path}.lora_magnitude_vector"),
            )
            for path, module in self.modules.items()
        }
        return AdapterState(self.method, modules, {name: named[name] for name in self.saved})


@dataclass(frozen=True, slots=True, eq=False)
class TrainState:
    """Everything needed to resume a run, on any backend.

    Args:
        step: optimizer steps finished; 0 at the start.
        adapter: the adapter after that step.
        moments: canonical tensor name -> AdamW's first and second moment, float32; empty before
            the first update.
        skipped: number of those steps skipped for a NaN or infinite loss or gradient. AdamW's bias
            correction counts updates, the schedule counts steps.

    With the method `full` the mappings of `adapter` and `moments` may be `LazyMapping`.

    `step` is also the data cursor (the order of examples is a function of seed and step) and the
    state of the random generators (functions of seed, step and micro-batch).
    """

    step: int
    adapter: AdapterState
    moments: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)
    skipped: int = 0

    @property
    def updates(self) -> int:
        """Number of updates applied to the adapter, AdamW's own count."""
        return self.step - self.skipped

    def copy(self) -> TrainState:
        """Return a state that shares no memory with this one."""
        values = {name: value.copy() for name, value in self.adapter.tensors().items()}
        moments = {name: (m.copy(), v.copy()) for name, (m, v) in self.moments.items()}
        return replace(self, adapter=self.adapter.with_tensors(values), moments=moments)
