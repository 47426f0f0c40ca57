"""TOML that somebody else wrote, read within limits: `tomllib`, whose faults are one kind."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_CHARACTERS = 4 << 20
MAX_PARTS = 64
"""Of a dotted key: `tomllib` takes the square of their number."""

_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MAX_PARTS}}}", re.M)


def loads(text: str) -> dict[str, Any]:
    """The tables of a document.

    Raises:
        tomllib.TOMLDecodeError: it is not TOML, too long, or nested too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        raise tomllib.TOMLDecodeError(f"it has more than {MAX_CHARACTERS:,} characters")
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError(f"a key has more than {MAX_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # a number of thousands of digits, a date that is none
        raise tomllib.TOMLDecodeError(str(error)) from error
