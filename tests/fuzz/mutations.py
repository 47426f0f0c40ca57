"""Files that are almost right: a valid one, changed in a few places, or anything at all.

`cases()` is how many of them each test looks at; `make fuzz N=20000` asks for more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vox_core.errors import VoxError

SECONDS = 1.0

TOKENS = [
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"1.5", b"9" * 25, b"0" * 5000,
    b"9223372036854775808", b"18446744073709551616", b'"', b"'", b"''", b"[", b"]", b"{", b"}",
    b",", b":", b"=", b"#", b"\\", b"\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b"\\ud800", b"../../x", b"/etc/passwd", b"[" * 3000, b'{"a":' * 3000, b"a." * 500, b"[[x]]\n",
    b"[x]\n", b"x = 1\n", b'{"a": 1, "a": 2}', "🦊é".encode(), b"1979-05-27T07:32:00Z", b" " * 3000,
    b"step", b"F32", b"F4", b"[0, 0]", b"[]", b"{}", b'""', b"1_000", b"0x1F", b"inf", b"nan",
]  # fmt: skip

Edit = tuple[str, float, float, bytes]
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "replace", "repeat", "end"]),
        st.floats(0, 1),
        st.floats(0, 0.2),
        st.sampled_from(TOKENS),
    ),
    min_size=1,
    max_size=5,
)


def cases(share: float = 1.0) -> settings:
    """So many cases, the same ones each time unless there are more than usual."""
    number = int(os.environ.get("VOX_FUZZ", "200"))
    return settings(
        max_examples=max(1, int(number * share)),
        deadline=None,  # `looked_at` counts the time of the process, not of the machine
        derandomize="VOX_FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


def mutated(*valid: bytes) -> st.SearchStrategy[bytes]:
    """One of `valid` with a few edits; now and then, anything."""
    edited = st.builds(edit, st.sampled_from(valid), _EDITS)
    return st.one_of(edited, edited, edited, edited, st.binary(max_size=300))


def edit(content: bytes, edits: list[Edit]) -> bytes:
    for kind, place, share, token in edits:
        at = int(place * len(content))
        end = at + int(share * len(content)) + 1
        match kind:
            case "flip" if content:
                at = min(at, len(content) - 1)
                content = (
                    content[:at] + bytes([content[at] ^ (1 << int(share * 39))]) + content[at + 1 :]
                )
            case "cut":
                content = content[:at] + content[end:]
            case "insert":
                content = content[:at] + token + content[at:]
            case "replace":
                content = content[:at] + token + content[end:]
            case "repeat":
                content = content[:end] + content[at:]
            case "end":
                content = content[:at]
    return content


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "BF16", "../x", "auto_map", "\ud800", "user", "assistant", "0" * 64]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip


def looked_at(read: Callable[[], Any]) -> None:
    """Read, and hold it against the promise: vox's own errors alone, each within a second."""
    # What is slow is slow again; a collection of the test's own garbage is not.
    assert _seconds(read) < SECONDS or min(_seconds(read), _seconds(read)) < SECONDS


def _seconds(read: Callable[[], Any]) -> float:
    start = time.process_time()
    try:
        read()
    except VoxError as error:
        str(error).encode("utf-8", "backslashreplace")
    return time.process_time() - start
