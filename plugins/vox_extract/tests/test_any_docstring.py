"""Whatever stands in a docstring, its rows are rows that vox takes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from vox_core.data.json_rows import parse_object
from vox_core.data.rows import parse_row
from vox_extract.definitions import Definition
from vox_extract.locate import Library, SourceFile
from vox_extract.python_rows import rows_of
from vox_extract.rows import Sieve

LINES = st.sampled_from(
    ["", "Some words.", "f(a, b) -> c", "Parameters", "----------", "a : int", "    What it is.",
     "*args, **kwargs", "Returns", "Args:", "    a (int): What it is.", "    b: more", "Returns:",
     "    dict: of things", ":param a: what it is", ":param int b:", ":raises ValueError:",
     ".. deprecated:: 1.0", "   Because.", ".. note::", ">>> f(1)", "1", "Example::", "    code()",
     "Examples", "--------", "Raises", "ValueError", "Attributes:", "Yields:", "Notes", "--",
     "%(doc)s", "\x00", "\ud800", "a, b :", ": :", "    - :", "```", "`", "=====", "Raises:",
     "    : nothing", "Deprecated", "1.2 : gone", "See Also", "\t\ttabs", "Other Parameters",
     ":rtype: x"]
)  # fmt: skip


@given(st.lists(LINES, max_size=25).map("\n".join))
@example("Yields:\nRaises:\n    a (int): What it is.")  # an IndexError in griffe 2.4
@example(":param int b:\nWords of it.\n\ud800")
def test_every_row_is_one_that_vox_takes(doc: str) -> None:
    definition = Definition("m.f", "function", 1, doc, ("(a, b)",), init_doc=doc[::2])
    sieve, file = Sieve(), SourceFile(Path("m.py"), "m.py", "m")
    library = Library("m", "1", "unknown", (file,))
    rows = list(sieve.keep(rows_of(definition, library, file, sieve.max_characters)))
    for row in rows:
        read = parse_row(parse_object(row.line()))
        assert [message.role for message in read.messages] == ["user", "assistant"]
        assert "provenance" not in read.unused
        assert len(row.answer) <= sieve.max_characters
    assert len({row.question for row in rows}) == len(rows)
