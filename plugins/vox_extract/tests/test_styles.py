"""Every row of a docstring in each of the styles, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugins.vox_extract.tests.samples import GOOGLE, NUMPY, SPHINX, made, rows_in, said

from vox_extract.docstring import style_of

SCALED = [
    (
        "describe",
        "What does `pack.maths.scale` do?",
        "Multiply each value by a factor.\n"
        "\n"
        "The result has the shape of `values`; see `numpy.multiply`.\n"
        "\n"
        "It is linear.",
    ),
    (
        "signature",
        "Which arguments does `pack.maths.scale` take?",
        "```python\npack.maths.scale(values, factor=2.0, *, out=None)\n```",
    ),
    (
        "parameter",
        "In `pack.maths.scale`, what is `values` for?",
        "`values` (array_like): What is multiplied, element by element.",
    ),
    (
        "parameter",
        "What does the parameter `factor` of `pack.maths.scale` mean?",
        "`factor` (float): By how much it is multiplied.",
    ),
    (
        "parameter",
        "What does the parameter `offset` of `pack.maths.scale` mean?",
        "`offset` (float): By how much it is multiplied.",
    ),
    (
        "returns",
        "What is the return value of `pack.maths.scale`?",
        "`scaled` (ndarray): The products.",
    ),
    (
        "raises",
        "Which exceptions does `pack.maths.scale` raise?",
        "`ValueError`: If `factor` is not finite.",
    ),
    (
        "example",
        "How do I use `pack.maths.scale`?",
        "Twice as much:\n"
        "\n"
        "```python\n"
        ">>> scale([1, 2])\n"
        "array([2., 4.])\n"
        "\n"
        ">>> scale([1], 3)\n"
        "array([3.])\n"
        "```",
    ),
]
BOXED = [
    ("describe", "What does the class `pack.boxes.Box` do?", "A box that holds things."),
    (
        "signature",
        "Which arguments does `pack.boxes.Box` take?",
        "```python\npack.boxes.Box(size: int = 3)\n```",
    ),
    (
        "parameter",
        "In `pack.boxes.Box`, what is `size` for?",
        "`size`: How many things will fit. Not less than one.",
    ),
    (
        "attribute",
        "Describe the attribute `size` of `pack.boxes.Box`.",
        "`size` (int): How many things fit in.",
    ),
    ("describe", "What is the method `pack.boxes.Box.take` for?", "Takes a thing out."),
    (
        "signature",
        "Show the signature of `pack.boxes.Box.take`.",
        "```python\npack.boxes.Box.take(name: str, *, hard: bool = False) -> str\n```",
    ),
    (
        "parameter",
        "In `pack.boxes.Box.take`, what is `name` for?",
        "`name` (str): What it is called.",
    ),
    ("parameter", "In `pack.boxes.Box.take`, what is `hard` for?", "`hard`: Whether to pull."),
    ("returns", "What is the return value of `pack.boxes.Box.take`?", "str: The thing itself."),
    (
        "raises",
        "When does `pack.boxes.Box.take` raise an exception?",
        "`KeyError`: If nothing is called so.",
    ),
    (
        "example",
        "How do I use `pack.boxes.Box.take`?",
        'A box of one:\n\n```python\nBox(1).take("a")\n```',
    ),
]
FETCHED = [
    (
        "describe",
        "Explain what `pack.web.fetch` does.",
        "Fetch what is at an address.\n\nDeprecated since version 2.1: Use `get`.",
    ),
    (
        "signature",
        "Show the signature of `pack.web.fetch`.",
        "```python\npack.web.fetch(address: str, tries: int = 1) -> bytes\n```",
    ),
    (
        "parameter",
        "In `pack.web.fetch`, what is `address` for?",
        "`address` (str): where it is, with its scheme",
    ),
    (
        "parameter",
        "Explain the parameter `tries` of `pack.web.fetch`.",
        "`tries` (int): how often to try again",
    ),
    ("returns", "What does `pack.web.fetch` return?", "bytes: what was there"),
    (
        "raises",
        "When does `pack.web.fetch` raise an exception?",
        "`OSError`: when the line is down",
    ),
    (
        "deprecated",
        "Should I still use `pack.web.fetch`?",
        "Deprecated since version 2.1: Use `get`.",
    ),
]


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [("maths", NUMPY, SCALED), ("boxes", GOOGLE, BOXED), ("web", SPHINX, FETCHED)],
)
def test_rows_of_a_style(tmp_path: Path, name: str, source: str, expected) -> None:
    assert said(rows_in(made(tmp_path, {f"{name}.py": source}))) == expected


WORDS = '''
"""What the module is for, in some words."""

def join(parts, sep):
    """join(parts, sep) -> str

    Join the parts.  For example:

    >>> join(["a"], "-")
    'a'

    Nothing else::

        join([], "-")
    """
'''


def test_a_docstring_of_words_alone(tmp_path: Path) -> None:
    rows = {(row.kind, row.answer) for row in rows_in(made(tmp_path, {"text.py": WORDS}))}
    assert rows == {
        ("describe", "What the module is for, in some words."),
        ("describe", 'Nothing else:\n\n```\njoin([], "-")\n```'),
        ("signature", "```python\npack.text.join(parts, sep)\n```"),
        ("example", 'Join the parts.  For example:\n\n```python\n>>> join(["a"], "-")\n\'a\'\n```'),
    }


@pytest.mark.parametrize(
    ("doc", "style"),
    [
        ("X.\n\nExamples\n--------\n>>> x", "numpy"),
        ("X.\n\nArgs:\n    a: b", "google"),
        ("X.\n\n:param a: b", "sphinx"),
        ("X: y.\n\nNote: no section\n", "words"),
        ("X.\n\nArgs: all in a line", "words"),
        ("Title\n=====\n\nWords.", "words"),
    ],
)
def test_each_docstring_has_its_own_style(doc: str, style: str) -> None:
    assert style_of(doc) == style


def test_what_comes_after_the_fields_is_not_the_last_fields(tmp_path: Path) -> None:
    doc = "Does it well.\n\n    :param a: the first thing there is\n\n    The end.\n    "
    source = f'def f(a):\n    """{doc}"""\n'
    rows = rows_in(made(tmp_path, {"x.py": source}))
    assert [row.answer for row in rows if row.kind in ("describe", "parameter")] == [
        "Does it well.\n\nThe end.",
        "`a`: the first thing there is",
    ]


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (
            "@deprecated('Use g instead.')\ndef f(a):\n    '''Does it.'''",
            "Deprecated: Use g instead.",
        ),
        (
            "def f(a):\n    '''Does it.\n\n    .. deprecated:: 3\n    '''",
            "Deprecated since version 3.",
        ),
        (
            "def f(a):\n    '''Does it.\n\n    Parameters\n    ----------\n    a : int\n"
            "        No.\n\n        .. deprecated:: 3\n    '''",
            None,  # of the parameter, and not of f
        ),
    ],
)
def test_deprecation(tmp_path: Path, source: str, answer: str | None) -> None:
    rows = rows_in(made(tmp_path, {"x.py": source}))
    assert [row.answer for row in rows if row.kind == "deprecated"] == [answer] * bool(answer)
