"""Configuration and tokenizer of a model folder, read by transformers in a child process.

transformers does not import torch there. The child imports this module or `vocabulary.py`, and an
export waits for it, so that neither imports `vox_core.api.models` or `generating`.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vox_core.api.files import read_json
from vox_core.api.tokenizers import Worker, WorkerDied
from vox_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

R = TypeVar("R")

_child: list[Worker] = []


def without_torch(function: Callable[..., R], *args: Any) -> R:
    """Call a top-level function in a child process, where transformers does not import torch.

    Where transformers is imported already, or that fails, `function` runs in this process, and
    raises its own error. The child serves until `end_child`.
    """
    if "transformers" in sys.modules:
        return function(*args)
    if (child := next(iter(_child), None)) is None:
        atexit.register(end_child)
        _child.append(child := Worker())
    try:
        made = child(_attempt, function, *args)
    except WorkerDied:
        made = None
    return function(*args) if made is None else made


def end_child() -> None:
    """End the child of `without_torch`, whose memory is as much as that of a conversion."""
    while _child:
        _child.pop().close()


def _attempt(function: Callable[..., R], *args: Any) -> R | None:
    try:
        return function(*args)
    except Exception:  # noqa: BLE001 (raised again by the caller: few errors can be pickled)
        return None


def full_config(folder: Path) -> Mapping[str, Any]:
    """Return every setting of a model, with transformers' defaults for those left out."""
    return without_torch(_full_config, folder)


def _full_config(folder: Path) -> Mapping[str, Any]:
    config = read_json(folder / "config.json")
    return {**config, **transformers_config(config, folder).to_dict()}


def transformers_config(config: Mapping[str, Any], folder: Path) -> PretrainedConfig:
    """Return every setting of the family, as transformers reads `config`.

    Raises:
        ModelError: M002.
    """
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    except Exception as error:
        raise ModelError(
            "M002",
            "transformers cannot read the configuration",
            where=folder / "config.json",
            found=error,
            expected="settings that the installed transformers accepts",
            remedy="correct the file, or download the model again",
        ) from error
