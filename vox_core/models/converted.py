"""Convert GGUF files to Hugging Face folders in the cache, each once.

A folder is named after the model and the SHA-256 of the GGUF file. It is written atomically, under
a lock: a second process waits for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core import files
from vox_core.cache import cache_folder
from vox_core.errors import ModelError
from vox_core.weights import WEIGHTS, Spec, stored_bytes, write_safetensors
from vox_formats import DamagedFile, FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.models import Progress


def made_once(name: str, sha256: str, obtain: Callable[[Path], Path], report: Progress) -> Path:
    """Return the folder of the model `name`, converted now unless the cache has it.

    Args:
        sha256: hash of the model's source.
        obtain: takes a temporary folder and returns the GGUF file.

    Raises:
        ModelError: an error of `obtain`; M008, the file cannot be converted.
        StorageError: the disk is full, or an I/O error.
    """
    from filelock import FileLock

    models = cache_folder("models")
    folder = models / f"{name}-{sha256[:12]}"
    if folder.is_dir():
        return folder
    with files.storage_errors(folder), FileLock(models / f".{folder.name}.lock"):
        for left in models.glob(f"{files.TEMPORARY_PREFIX}{folder.name}*"):  # by killed processes
            files.remove(left)
        if not folder.is_dir():
            with files.folder_beside(folder) as scratch:
                convert_gguf(obtain(scratch), folder, report)
    return folder


def convert_gguf(path: Path, folder: Path, report: Progress) -> None:
    """Convert the GGUF file `path` into a new Hugging Face `folder`, atomically.

    Raises:
        ModelError: M008, with every reason why the file cannot be converted.
        OutputError: `folder` exists, or cannot be made.
        StorageError: the disk is full, or an I/O error.
    """
    from vox_formats.gguf_model import GgufModel

    try:
        with files.storage_errors(path):
            model = GgufModel(path)
    except FormatError as error:
        raise ModelError(
            "M008",
            where=path,
            **error.facts,
            remedy="copy or download the file again"
            if isinstance(error, DamagedFile)
            else "use the model's Hugging Face repository instead of the GGUF file",
        ) from error
    with files.atomic_folder(folder) as new:
        for name, text in model.files.items():
            files.write_text(new / name, text)
        specs = {name: ("BF16", shape) for name, shape in model.shapes.items()}
        write_safetensors(new / WEIGHTS, specs, _reported(model.tensors(), specs, report))


def _reported(
    tensors: Iterator[tuple[str, NDArray[Any]]], specs: Mapping[str, Spec], report: Progress
) -> Iterator[tuple[str, NDArray[Any]]]:
    total = sum(stored_bytes(*spec) for spec in specs.values())
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += tensor.nbytes
        report("converting", done, total)
