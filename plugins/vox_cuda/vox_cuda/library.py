"""Check bitsandbytes' compiled CUDA library, which it selects on import."""

from __future__ import annotations

from vox_core.contract import Check, Optimizer, Quant
from vox_core.errors import BackendError
from vox_torch.libraries import import_bitsandbytes

_ITS_OWN: tuple[Quant, ...] = ("nf4", "nf4-embeddings", "nf4-single")


def require_bitsandbytes(quant: Quant, optimizer: Optimizer = "adamw") -> None:
    """Check that bitsandbytes supports the requested formats, before a model is loaded.

    Raises:
        BackendError: B004, it has no library for torch's CUDA.
    """
    if quant not in _ITS_OWN and optimizer == "adamw":
        return
    found = bitsandbytes()
    if not found.ok:
        raise BackendError(
            "B004",
            "bitsandbytes cannot compute on the GPU",
            where=f"quantisation {quant}, optimizer {optimizer}",
            found=found.detail,
            expected="its library for the CUDA that torch was built with",
            remedy=found.remedy,
        )


def bitsandbytes() -> Check:
    """Whether bitsandbytes loaded its library for torch's CUDA version."""
    try:
        version = import_bitsandbytes().__version__
        from bitsandbytes.cextension import lib
    except Exception as error:  # noqa: BLE001 - its import searches libraries
        return Check(
            "bitsandbytes",
            False,
            f"cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "install it again: pip install --force-reinstall --no-deps bitsandbytes",
        )
    named = f"bitsandbytes {version}"
    if lib.compiled_with_cuda:
        return Check("bitsandbytes", True, f"{named} with its CUDA library")
    return Check(
        "bitsandbytes",
        False,
        f"{named} did not load its CUDA library",
        "it takes the one for torch's CUDA once torch reaches the GPU; `python -m bitsandbytes` "
        "tells more",
    )
