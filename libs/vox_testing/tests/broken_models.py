"""Ways to break a model: its files, scores, adapters and generation.

Each is a method of `mutant.answering`, called with the right model and the method's arguments, or
makes several that share what they remember.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vox_core.contract import AdapterState, Batch, RowByRow
from vox_core.errors import VoxError
from vox_core.weights import WEIGHTS, SafetensorsFile, write_safetensors

HEAD = "lm_head"


# --- files ----------------------------------------------------------------------------------------


def with_settings(**settings: Any) -> Any:
    """Read the configuration with other values; only where it has the setting, and None removes."""

    def settled(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        changed = {**config, **{k: v for k, v in settings.items() if k in config}}
        file.write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))

    return _of_another_folder(settled)


def with_tensors(change: Callable[[str, Any], Any]) -> Any:
    """Read other weights."""

    def written(folder: Path) -> None:
        file = SafetensorsFile(folder / WEIGHTS)
        tensors = {name: change(name, np.array(file.read(name))) for name in file.tensors}
        specs = {name: (file.tensors[name].dtype, value.shape) for name, value in tensors.items()}
        write_safetensors(folder / WEIGHTS, specs, tensors.items())

    return _of_another_folder(written)


def _of_another_folder(change: Callable[[Path], None]) -> Any:
    def call(right: Any, job: Any) -> Any:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            shutil.copytree(job.model, folder)
            change(folder)
            return right(replace(job, model=folder))

    return call


def without_biases(name: str, value: Any) -> Any:
    return np.zeros_like(value) if name.endswith("bias") else value


def norms_of_one_more(name: str, value: Any) -> Any:
    return value + value.dtype.type(1) if name.endswith("norm.weight") else value


def heads_of_another_size(name: str, value: Any) -> Any:
    """As if attention were divided by the root of hidden size / heads, where heads are larger."""
    wide = "q_proj" in name and value.shape[0] > value.shape[1]
    return value * value.dtype.type(np.sqrt(2)) if wide else value


# --- scores ---------------------------------------------------------------------------------------


def scoring(change: Callable[[Batch], Batch]) -> Any:
    def log_probs(right: Any, batch: Batch, *args: Any) -> Any:
        return right.log_probs(change(batch), *args)

    return log_probs


def scores(change: Callable[[Any, Batch], Any]) -> Any:
    """`log_probs`, its result changed."""

    def log_probs(right: Any, batch: Batch, *args: Any) -> Any:
        return change(right.log_probs(batch, *args), batch)

    return log_probs


def everywhere(batch: Batch) -> Batch:
    return replace(batch, scored_T=np.ones_like(batch.scored_T))


def where_trained(batch: Batch) -> Batch:
    return Batch(batch.tokens_T, batch.targets_T, batch.weights_T, batch.starts_D)


def of_the_tokens(batch: Batch) -> Batch:
    return replace(batch, targets_T=batch.tokens_T)


def one_document(batch: Batch) -> Batch:
    return replace(batch, starts_D=batch.starts_D[:1])


def named(change: Callable[[str | None], str | None]) -> dict[str, Any]:
    """Answer under another adapter's name."""
    return {
        "log_probs": lambda right, batch, adapter=None, seed=None: right.log_probs(
            batch, change(adapter), seed
        ),
        "logits": lambda right, tokens_T, adapter=None, first=0: right.logits(
            tokens_T, change(adapter), first
        ),
        "insert": lambda right, row, tokens_T, adapter=None: right.insert(
            row, tokens_T, change(adapter)
        ),
    }


def the_last_added() -> dict[str, Any]:
    """Every adapter is the one that was added last."""
    last: list[str] = []

    def add_adapter(right: Any, name: str, adapter: AdapterState) -> None:
        last.append(name)
        right.add_adapter(name, adapter)

    return {"add_adapter": add_adapter, **named(lambda name: last[-1] if name else None)}


def base_with_adapter() -> dict[str, Any]:
    """The first adapter is applied to the base, too."""
    first: list[str] = []

    def add_adapter(right: Any, name: str, adapter: AdapterState) -> None:
        first.append(name)
        right.add_adapter(name, adapter)

    return {
        "add_adapter": add_adapter,
        **named(lambda name: name or (first[0] if first else None)),
    }


# --- adapters -------------------------------------------------------------------------------------


def adding(change: Callable[[AdapterState], AdapterState]) -> Any:
    return lambda right, name, adapter: right.add_adapter(name, change(adapter))


def unchecked(right: Any, name: str, adapter: AdapterState) -> None:
    with suppress(VoxError):
        right.add_adapter(name, adapter)


def unscaled(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, alpha=float(m.rank)) for p, m in adapter.modules.items()}
    method = "lora" if adapter.method == "rslora" else adapter.method
    return replace(adapter, method=method, modules=modules)


def alpha_over_r(adapter: AdapterState) -> AdapterState:
    return replace(adapter, method="lora" if adapter.method == "rslora" else adapter.method)


def without_effect(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, B_OR=np.zeros_like(m.B_OR)) for p, m in adapter.modules.items()}
    return replace(adapter, modules=modules)


def without_magnitude(adapter: AdapterState) -> AdapterState:
    modules = {p: replace(m, magnitude_O=None) for p, m in adapter.modules.items()}
    method = "lora" if adapter.method == "dora" else adapter.method
    return replace(adapter, method=method, modules=modules)


def without_whole(adapter: AdapterState) -> AdapterState:
    return replace(adapter, saved={})


def without_head(adapter: AdapterState) -> AdapterState:
    modules = {
        path: replace(module, B_OR=np.zeros_like(module.B_OR)) if path == HEAD else module
        for path, module in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


def foreign_errors(right: Any, job: Any) -> Any:
    try:
        return right(job)
    except VoxError as error:
        raise ValueError(error.found) from error


# --- generation -----------------------------------------------------------------------------------


def inserting(change: Callable[[Any], Any]) -> Any:
    return lambda right, row, tokens_T, *args: right.insert(row, change(tokens_T), *args)


def one_token_late() -> dict[str, Any]:
    """The logits of the step before."""
    last: dict[int, Any] = {}

    def advance(right: Any, tokens: Mapping[int, int]) -> Any:
        found = right.advance(tokens)
        late = {row: last.get(row, logits_V) for row, logits_V in found.items()}
        last.update(found)
        return late

    def remove(right: Any, row: int) -> None:
        last.pop(row, None)
        right.remove(row)

    return {"advance": advance, "remove": remove}


def padded_with_tokens() -> dict[str, Any]:
    """A shorter prompt begins with the first token of a row that is there."""
    there: dict[int, Any] = {}

    def insert(right: Any, row: int, tokens_T: Any, adapter: str | None = None) -> None:
        other = next(iter(there.values()), tokens_T[:0])
        there[row] = tokens_T[:1]
        right.insert(row, np.concatenate([other, tokens_T]), adapter)

    def remove(right: Any, row: int) -> None:
        there.pop(row, None)
        right.remove(row)

    return {"insert": insert, "remove": remove}


def adapter_of_the_first() -> dict[str, Any]:
    """One adapter for the whole batch."""
    there: dict[int, str | None] = {}

    def insert(right: Any, row: int, tokens_T: Any, adapter: str | None = None) -> None:
        there[row] = next(iter(there.values()), adapter)
        right.insert(row, tokens_T, there[row])

    def remove(right: Any, row: int) -> None:
        there.pop(row, None)
        right.remove(row)

    return {"insert": insert, "remove": remove}


def numbered_by_place(right: Any, tokens: Mapping[int, int]) -> Any:
    """Rows in the order of their numbers have the logits in the order of the batch."""
    found = right.advance(tokens)
    return dict(zip(sorted(found), found.values(), strict=True))


def closing_up() -> dict[str, Any]:
    """When a row has left, the next one's logits stand in the place of those before it."""
    left: list[int] = []

    def advance(right: Any, tokens: Mapping[int, int]) -> Any:
        found = right.advance(tokens)
        if not left or len(found) < 2:
            return found
        return dict(zip(found, [*list(found.values())[1:], *list(found.values())[:1]], strict=True))

    def remove(right: Any, row: int) -> None:
        left.append(row)
        right.remove(row)

    return {"advance": advance, "remove": remove}


def one_row_a_step(right: Any, tokens: Mapping[int, int]) -> Any:
    return right.advance(dict([*tokens.items()][:1]))


def in_float64(right: Any, tokens: Mapping[int, int]) -> Any:
    return {row: found.astype(np.float64) for row, found in right.advance(tokens).items()}


class _Windowed(RowByRow):
    """Rows see no more than their last 64 tokens."""

    def __init__(self, right: Any) -> None:
        self._right = right

    def _last_logits(self, tokens: list[int], adapter: str | None) -> Any:
        return self._right.logits(np.array(tokens[-64:]), adapter)[-1]


_Windowed.__abstractmethods__ = frozenset()


def short_memory() -> dict[str, Any]:
    windows: list[_Windowed] = []

    def through(name: str) -> Any:
        def method(right: Any, *args: Any) -> Any:
            if not windows:
                windows.append(_Windowed(right))
            return getattr(windows[0], name)(*args)

        return method

    return {name: through(name) for name in ("insert", "advance", "remove")}
