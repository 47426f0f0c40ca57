"""Formats of other tools, in numpy: GGUF, quantisations, mlx-lm's adapters and models.

    quant.py           NF4, INT8 and MLX's quantisations of a weight, bit for bit
    gguf_model.py      a GGUF file -> the files and tensors of a Hugging Face folder
    gguf_tokenizer.py  its tokenizer
    gguf_layout.py     tensors of a GGUF file from parameters of a Hugging Face model
    gguf_families.py   metadata and tensors of each family
    mlx_model.py       where mlx-lm's models differ from Hugging Face's: settings, names
    mlx_adapter.py     mlx-lm's adapter files <-> low-rank updates

This package imports no other package of vox and writes no files. Unsupported or malformed input
raises `FormatError`; the caller adds location and remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FormatError(ValueError):
    """Input that a format does not support, or that violates it.

    Args:
        what: the fault in one line.
        faults: each single fault, when there are several.
    """

    def __init__(
        self,
        what: str,
        *,
        found: str | None = None,
        expected: str | None = None,
        faults: Sequence[str] = (),
    ) -> None:
        super().__init__("; ".join([what, *faults]))
        self.what, self.found, self.expected, self.faults = what, found, expected, tuple(faults)

    @property
    def facts(self) -> dict[str, Any]:
        """Arguments for the error of a caller, who adds code, location and remedy."""
        names = "what", "found", "expected", "faults"
        return {name: getattr(self, name) for name in names}


class DamagedFile(FormatError):
    """A truncated or corrupt file; another copy may be intact."""
