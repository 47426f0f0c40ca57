"""`[eval]` of `vox.toml`, the flags of `vox eval`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from vox_core.api.settings import Count, DTypeChoice, ModelUse, Paths


class EvalSettings(ModelUse):
    """`vox eval`."""

    section: ClassVar[str] = "eval"

    suite: Paths = Field((), description="Suite file (TOML). Repeatable.")
    against: str | None = Field(
        None, description="Model or run to compare with, or the folder of an earlier evaluation."
    )
    out: Path | None = Field(
        None, description="Folder of the results.  [default: evals/SUITE-MODEL-DIGEST]"
    )
    dtype: DTypeChoice = Field("auto", description="Compute dtype.")
    limit: Count = Field(0, description="Use the first N rows of each task; 0: all.")
