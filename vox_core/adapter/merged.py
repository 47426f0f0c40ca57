"""What a merged tensor must be, checked on some of its rows, in float64.

The proof on logits (vox_core/run/proof.py) sees the model as a whole; this sees each tensor, so
that not even one module can be left out of a merge.

Shape legend: R rank, I input features, O output features, P rows that are checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vox_core.contract import AdapterState, ModuleShape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROWS = 4
# Unit roundoff of what is stored, by safetensors' names; and what float32 arithmetic may add to it,
# relative to the size of the terms: 2^-24 times the square root of a rank of 64, and then tenfold.
ROUNDOFF = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}
ARITHMETIC = 10 * 8 * 2.0**-24
SMALLEST = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149}


def is_merged(
    merged: NDArray[Any],
    W: NDArray[Any],
    adapter: AdapterState,
    path: str,
    shape: ModuleShape,
    dtype: str,
) -> bool:
    """Whether rows of `merged`, spread over it, are base + update as far as rounding allows.

    Args:
        merged, W: as stored, (I, O) where the shape says transposed.
        dtype: safetensors' name of what `merged` was rounded to.
    """
    import numpy as np

    rows_P = np.linspace(0, shape.out_features - 1, ROWS).astype(int)
    W_OI, merged_OI = (W.T, merged.T) if shape.transposed else (W, merged)
    exact_PI, terms_PI = _exact(W_OI[rows_P].astype(np.float64), adapter, path, rows_P)
    allowed_PI = ROUNDOFF[dtype] * np.abs(exact_PI) + ARITHMETIC * terms_PI + SMALLEST[dtype]
    return bool(np.all(np.abs(merged_OI[rows_P].astype(np.float64) - exact_PI) <= allowed_PI))


def _exact(
    W_PI: NDArray[np.float64], adapter: AdapterState, path: str, rows_P: NDArray[np.int_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The merged rows, and the size of the terms that were added up for them."""
    import numpy as np

    module, scale = adapter.modules[path], adapter.scale(path)
    A_RI, B_PR = module.A_RI.astype(np.float64), module.B_OR[rows_P].astype(np.float64)
    exact_PI = W_PI + scale * (B_PR @ A_RI)
    terms_PI = np.abs(W_PI) + abs(scale) * (np.abs(B_PR) @ np.abs(A_RI))
    if module.magnitude_O is not None:
        factor_P = module.magnitude_O[rows_P] / np.linalg.norm(exact_PI, axis=1)
        exact_PI, terms_PI = exact_PI * factor_P[:, None], terms_PI * np.abs(factor_P)[:, None]
    return exact_PI, terms_PI
