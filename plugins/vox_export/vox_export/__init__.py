"""Adapters and merged models in the formats of other tools, each verified.

export.py       `vox export`: GGUF, Ollama, mlx-lm, LoRA as GGUF
  vocabulary.py   a tokenizer in GGUF
  child.py        configuration and tokenizer, read in a child process
  gguf_file.py    the files, tensor by tensor
  ollama.py       a chat template as Ollama's
  llama_cpp.py    llama.cpp as it is installed
  quality.py      the result beside base + adapter
convert.py      an adapter for PEFT or mlx-lm
equivalence.py  two adapters compared: bits, updates, logits
settings.py     the flags of `vox export`, and its section of vox.toml
requantise.py   `vox merge --quant`: a merged model in MLX's quantised formats
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from vox_core.contract import WriteModelJob
    from vox_export.settings import ExportSettings


class Export:
    """The hooks of this plugin."""

    @hookimpl
    def vox_write_model(self, job: WriteModelJob) -> None:
        from vox_export.export import write_model

        write_model(job)

    @hookimpl
    def vox_settings(self) -> type[ExportSettings]:
        from vox_export.settings import ExportSettings  # pydantic is not for the child (child.py)

        return ExportSettings


plugin = Export()
