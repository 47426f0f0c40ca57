"""`[serve]` of `vox.toml`, the flags of `vox serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from vox_core.api.settings import Count, LoadSettings, PositiveInt, Seconds


class ServeSettings(LoadSettings):
    """`vox serve`."""

    section: ClassVar[str] = "serve"

    host: str = Field("127.0.0.1", description="Address to listen on; others need an API key.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="Port to listen on; 0 takes a free one."
    )
    max_batch: PositiveInt | None = Field(
        None,
        description="Max answers generated at once.  [default: 16 on a CPU, 32 on an accelerator]",
    )
    queue: Count = Field(64, description="Max answers that wait; more requests get status 429.")
    max_tokens: PositiveInt = Field(
        2048, description="Max new tokens per answer, and the default of a request."
    )
    drain: Seconds = Field(
        30.0, description="After SIGTERM or Ctrl-C, time for running requests to finish."
    )
    allow_adapters: Path | None = Field(
        None, description="Let clients add runs inside this folder, and remove them."
    )
    engine: str = Field(
        "vox", description="Inference engine: vox, or llama.cpp or vllm (plugin `engines`)."
    )
    engine_python: Path | None = Field(
        None, description="Python interpreter of the environment with vllm or xllamacpp."
    )
    engine_args: str = Field("", description='Extra engine options: "--ctx-size 8192".')
