"""Adapters and merged models in the formats of other tools, each verified.

convert.py      `vox convert`: an adapter for PEFT or mlx-lm
equivalence.py  two adapters compared: bits, updates, logits
requantise.py   `vox merge --quant`: a merged model in MLX's quantised formats
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from vox_core.contract import WriteModelJob


class Export:
    """The hooks of this plugin."""

    @hookimpl
    def vox_write_model(self, job: WriteModelJob) -> None:
        from vox_export.requantise import requantise, require_quantisable

        if job.out is None:
            require_quantisable(job.model, job.format)
        else:
            requantise(job.model, job.out, job.format)


plugin = Export()
