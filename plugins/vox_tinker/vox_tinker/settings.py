"""`[tinker]` of `vox.toml`, flags of `vox tinker serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from vox_core.api.settings import Section


class TinkerSettings(Section):
    """`vox tinker serve`, beside what it takes of `vox train`."""

    section: ClassVar[str] = "tinker"

    host: str = Field("127.0.0.1", description="Address to listen on; others need an API key.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="Port to listen on; 0 takes a free one."
    )
    out: Path = Field(Path("runs"), description="Folder of the training clients' runs.")
