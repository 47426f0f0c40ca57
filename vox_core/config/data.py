"""`[data]`: which rows of the data are used, and how they are read."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vox_core.config.source import Sources
from vox_core.config.values import Section
from vox_core.contract import Curriculum


class DataSettings(Section):
    """What `vox train`, `vox plan` and `vox data` do to the rows before they are trained."""

    section: ClassVar[str] = "data"

    source: Sources = Field(
        (), description="Data and its share of each epoch, in place of --data. Repeatable."
    )
    curriculum: Curriculum = Field(
        "none", description="Order of an epoch: random, or from easy rows to difficult ones."
    )
