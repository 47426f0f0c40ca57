"""`[data]`: which rows of the data are used, and how they are read."""

from __future__ import annotations

from typing import ClassVar

from vox_core.config.values import Section


class DataSettings(Section):
    """What `vox train`, `vox plan` and `vox data` do to the rows before they are trained."""

    section: ClassVar[str] = "data"
