"""Which rules rows are read and tokenised by: the code itself, by digest.

What is kept in the cache was made under some rules; under others it is made anew. Nobody has to
remember to count a version up.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def rules_digest() -> str:
    """SHA-256, in hex, of the modules of this package and of those in it."""
    sha256, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        sha256.update(f"{path.relative_to(package).as_posix()}:{len(content)}:".encode())
        sha256.update(content)
    return sha256.hexdigest()
