"""`[export]` of `vox.toml`, the flags of `vox export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vox_core.api.files import default_out
from vox_core.api.settings import ModelUse


class ExportSettings(ModelUse):
    """`vox export`."""

    section: ClassVar[str] = "export"

    to: Literal["gguf", "gguf-lora", "ollama", "mlx", "mlx-lora", "peft"] | None = Field(
        None, description="Format to write."
    )
    quant: str | None = Field(
        None,
        description="Number format, such as f16, q8_0 or q4_k_m; auto: the smallest that keeps "
        "--max-kl.  [default: f16; with mlx none]",
    )
    max_kl: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Refuse a larger mean KL divergence from the original, in nats per token.  "
        "[default with --quant auto: 0.02]",
    )
    model: str | None = Field(None, description="Base model, if not the one in the run.")
    out: Path | None = Field(None, description="Output folder.  [default: RUN-FORMAT]")

    def folder(self, reference: str) -> Path:
        """Return the output folder for the run or model `reference`."""
        return self.out or default_out(reference, str(self.to))
