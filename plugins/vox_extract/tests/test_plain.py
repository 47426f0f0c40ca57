"""The markup of docstrings as plain text and code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vox_extract.markup import blocks, plain

INLINE = {
    ":func:`f` and :py:class:`~a.b.C`": "`f` and `C`",
    ":class:`the class <a.C>`, :meth:`!run`": "`the class`, `run`",
    ":ref:`the guide <guide>` and :term:`token`": "the guide and token",
    ":math:`x^2`": "$x^2$",
    "obj:`int`": "`int`",
    "``code`` and `name`": "`code` and `name`",
    "``a`b``": "``a`b``",
    "`the site <https://x.org>`_ or `this`__": "the site (https://x.org) or this",
    r"\*args and \`x\`": "*args and `x`",
    "as shown [1]_, [Knuth]_.": "as shown,.",
    "[`~models.Bert`] is one": "`models.Bert` is one",
    "[`x`](https://x.org)": "[`x`](https://x.org)",
    "a_b_c, `_x`": "a_b_c, `_x`",
}


@pytest.mark.parametrize("text", INLINE)
def test_within_a_line(text: str) -> None:
    assert plain(text) == INLINE[text]


BLOCKS = {
    "lines of a paragraph are joined": ("One\ntwo.\n\nThree.", "One two.\n\nThree."),
    "lists stay": ("- one\n  more\n- two", "- one more\n- two"),
    "what is laid out by hand stays": ("a\n    b\n  c", "a\n    b\n  c"),
    "a session is code": ("Text.\n\n>>> f()\n1", "Text.\n\n```python\n>>> f()\n1\n```"),
    "sessions are one block": (">>> f()\n\n>>> g()", "```python\n>>> f()\n\n>>> g()\n```"),
    "a session below words": ("So:\n>>> f()", "So:\n\n```python\n>>> f()\n```"),
    "a literal block": ("So::\n\n    f(\n      1)\n\nOn.", "So:\n\n```\nf(\n  1)\n```\n\nOn."),
    "two colons alone": ("::\n\n    x", "```\nx\n```"),
    "a code block": (
        "A.\n\n.. code-block:: Python\n   :linenos:\n\n   f()\n\nB.",
        "A.\n\n```python\nf()\n```\n\nB.",
    ),
    "fenced code": ("A.\n\n```sh\nls `x`\n```\nB.", "A.\n\n```sh\nls `x`\n```\n\nB."),
    "code with a fence in it": ("::\n\n    ```\n    x", "````\n```\nx\n````"),
    "a note": (
        ".. note:: Mind this,\n   and that.\n\n   Too.",
        "Note: Mind this, and that.\n\nToo.",
    ),
    "a version": (".. versionadded:: 1.2", "New in version 1.2."),
    "a version with words": (
        ".. versionchanged:: 3\n   Is faster.",
        "Changed in version 3: Is faster.",
    ),
    "a formula": (".. math:: x = 1", "$$\nx = 1\n$$"),
    "other directives and comments go": (
        "A.\n\n.. plot::\n\n   f()\n\n.. [1] A book.\n\n.. _target:\n\nB.",
        "A.\n\nB.",
    ),
    "a table is code": ("===  ===\na    b\n===  ===", "```\n===  ===\na    b\n===  ===\n```"),
    "a heading": ("Usage\n-----\n\nDo.", "**Usage**\n\nDo."),
    "a fence that never ends": ("```\nx", "```\nx\n```"),
    "nothing": ("\n \n", ""),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_paragraphs_and_code(case: str) -> None:
    text, expected = BLOCKS[case]
    assert plain(text) == expected


PIECES = st.sampled_from(
    [">>> ", "::", "```", "``", "`", ".. note::", ".. ", ":a:", "\n", "\n\n", "    ", "- ", "==",
     "[1]_", "\\", "a", "<", ">`_", "|", "\t", "~~~"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30).map("".join))
def test_any_text_is_taken(text: str) -> None:
    """No block is empty, and no text makes it fail."""
    assert all(block.text.strip() for block in blocks(text))


@pytest.mark.parametrize(
    "piece", ["`", "``", ":a:`", "[`", "`a <", ">>> \n", "[", ".. a::\n ", "\\"]
)
def test_a_long_text_is_read_to_its_end(piece: str) -> None:
    """A pattern that takes cubic time or more would reach the suite's own limit."""
    assert "The end." in plain(piece * 20_000 + "\n\nThe end.")
