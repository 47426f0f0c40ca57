"""Libraries that only some files need."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from vox_core.errors import DataError


def needed(module: str, path: Path) -> Any:
    """An optional library.

    Raises:
        DataError: D010, it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            "D010",
            f"this data needs {package}, which is not installed",
            where=path,
            found=error,
            expected=f"the package {package}",
            remedy=f"pip install {package}, or all that reads data: pip install 'vox-ml[data]'",
        ) from error
