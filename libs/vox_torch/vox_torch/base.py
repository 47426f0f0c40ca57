"""Load a base model: a local folder, safetensors only, frozen, in one dtype or quantised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vox_core.contract import DType, Quant
from vox_core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DTYPES: dict[DType, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(name: DType) -> torch.dtype:
    """Return the torch dtype of a contract's dtype name."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def load_base(folder: Path, dtype: DType, device: str, quant: Quant = "none") -> PreTrainedModel:
    """Load the model of `folder`, frozen and in evaluation mode, optionally quantised.

    Raises:
        ModelError: M002, transformers cannot build this model or its weights do not fit.
    """
    if quant == "none":
        model = _load_plain(folder, dtype)
    else:
        from vox_torch.quantised import load_quantised

        model = load_quantised(folder, torch_dtype(dtype), device, quant)
    model.requires_grad_(False)
    return model.to(device).eval()


def _load_plain(folder: Path, dtype: DType) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with quiet(), model_errors(folder):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch_dtype(dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if missing:
        raise ModelError(
            "M002",
            "weights are missing from the model folder, or have the wrong shape",
            where=folder,
            faults=missing,
            remedy="fetch the model again, whole",
        )
    return model


@contextmanager
def model_errors(folder: Path) -> Iterator[None]:
    """Map exceptions of transformers for a model it cannot build to a `ModelError`."""
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, AttributeError) as error:
        raise ModelError(
            "M002",
            "transformers cannot load this model",
            where=folder,
            found=f"{type(error).__name__}: {error}",
            remedy="check that the folder is whole, and that the installed transformers knows "
            "its model_type",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice; vox reports what matters itself."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
