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
    """SHA-256, in hex, of the modules of this package."""
    sha256 = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        content = path.read_bytes()
        sha256.update(f"{path.name}:{len(content)}:".encode())
        sha256.update(content)
    return sha256.hexdigest()
