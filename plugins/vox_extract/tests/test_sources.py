"""What is read of a source file, under which names, and what is left out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from plugins.vox_extract.tests.samples import made, read, rows_in

from vox_core.data.json_rows import parse_object
from vox_core.data.rows import parse_row
from vox_extract.docstring import split_signature

DOC = '"""Does the thing that it does."""'


def names(rows) -> set[str]:
    return {str(row.provenance["object"]) for row in rows}


# --- names ----------------------------------------------------------------------------------------

PUBLIC = {
    "handed on by the package": (
        {"__init__.py": "from ._impl import f", "_impl.py": f"def f(a):\n  {DOC}"},
        "pack.f",
    ),
    "as another name": (
        {"__init__.py": "from pack._impl import f as g", "_impl.py": f"def f(a):\n  {DOC}"},
        "pack.g",
    ),
    "by a star, through two modules": (
        {
            "__init__.py": "from ._a import *",
            "_a.py": "from ._b import *",
            "_b.py": f"def f(a):\n  {DOC}",
        },
        "pack.f",
    ),
    "by __all__ of others": (
        {
            "__init__.py": "from . import _a\nfrom ._a import *\n__all__ = [*_a.__all__]",
            "_a.py": f"__all__ = ['f']\ndef f(a):\n  {DOC}",
        },
        "pack.f",
    ),
    "the package above rather than its own": (
        {"__init__.py": "from .a.b import f", "a/__init__.py": "", "a/b.py": f"def f(a):\n  {DOC}"},
        "pack.f",
    ),
    "its own rather than that of somebody who uses it": (
        {
            "a/__init__.py": "from pack.x.b import f",
            "x/__init__.py": "",
            "x/b.py": f"def f(a):\n  {DOC}",
        },
        "pack.x.b.f",
    ),
    "the module that is called alike": (
        {
            "char.py": "from ._core.strings import *",
            "strings.py": "from ._core.strings import *",
            "_core/__init__.py": "",
            "_core/strings.py": f"def f(a):\n  {DOC}",
        },
        "pack.strings.f",
    ),
    "of its module": ({"__init__.py": "from .f import f", "f.py": f"def f(a):\n  {DOC}"}, "pack.f"),
    "with a faster one in C": ({"a.py": f"def f(a):\n  {DOC}\nfrom _a import f"}, "pack.a.f"),
    "for type checkers": (
        {
            "__init__.py": "from ._a import *",
            "_a.py": f"if TYPE_CHECKING:\n  def f(a):\n    {DOC}\nelse:\n  def f(): ...",
        },
        "pack.f",
    ),
    "under try": (
        {
            "__init__.py": "try:\n  import fast\nexcept ImportError:\n  from ._slow import f",
            "_slow.py": f"def f(a):\n  {DOC}",
        },
        "pack.f",
    ),
}


@pytest.mark.parametrize("case", PUBLIC)
def test_a_thing_has_its_public_name(tmp_path: Path, case: str) -> None:
    files, name = PUBLIC[case]
    assert names(rows_in(made(tmp_path, files))) == {name}


def test_a_module_that_uses_a_thing_does_not_offer_it(tmp_path: Path) -> None:
    files = {"user.py": "from ._impl import f", "_impl.py": f"def f(a):\n  {DOC}"}
    assert rows_in(made(tmp_path, files)) == []
    files["user.py"] += "\n__all__ = ['f']"
    assert names(rows_in(made(tmp_path, files))) == {"pack.user.f"}


def test_private_names_only_when_asked_for(tmp_path: Path) -> None:
    source = f"def f(a):\n  {DOC}\ndef _g(a):\n  'Does quite another thing.'\n"
    source += "class C:\n  def __enter__(self, a):\n    'Enters into it, as one does.'\n"
    package = made(tmp_path, {"a.py": source, "_b.py": "def h(a):\n  'Is somewhere private.'"})
    rows, sieve, _ = read(package)
    assert names(rows) == {"pack.a.f"}
    assert sieve.left_out["private"] == 3
    everything = names(rows_in(package, private=True))
    assert everything == {"pack.a.f", "pack.a._g", "pack.a.C.__enter__", "pack._b.h"}


def test_imports_in_a_circle_end(tmp_path: Path) -> None:
    round_and_round = "from .{0} import *\nfrom . import {0}\n__all__ = ['{1}', *{0}.__all__]\n"
    files = {
        "__init__.py": "from ._a import *",
        "_a.py": f"{round_and_round.format('_b', 'f')}def f(a): 'Does the first thing.'",
        "_b.py": f"{round_and_round.format('_a', 'g')}def g(a): 'Does the second thing.'",
    }
    assert names(rows_in(made(tmp_path, files))) == {"pack.f", "pack.g"}


# --- what is read ---------------------------------------------------------------------------------

SIGNATURES = {
    "def f(): 'It takes nothing at all.'": [],
    "def f(a, /, b=1, *c, d, e: int = 2, **g) -> str: 'Takes it all.'": [
        "(a, /, b=1, *c, d, e: int = 2, **g) -> str"
    ],
    "class C:\n  @classmethod\n  def f(cls, a): 'Is a class method.'": ["(a)"],
    "class C:\n  @staticmethod\n  def f(a): 'Is a static method.'": ["(a)"],
    "class C:\n  @property\n  def f(self): 'Is a property.'": [],
    "class C:\n  'Makes it by new.'\n  def __new__(cls, a): ...": ["(a)"],
    "class C:\n  def f(self, /, a): 'Has a slash.'": ["(a)"],
    "class C:\n  def f(*args): 'Has no self.'": ["(*args)"],
    "import typing\n@typing.overload\ndef f(a): 'Is one of them.'\ndef f(a=1): 'Has overloads.'": [
        "(a=1)"
    ],
    f"def f({', '.join(f'argument_{i}' for i in range(9))}): 'Long one, this.'": [
        "(\n" + "".join(f"    argument_{i},\n" for i in range(9)) + ")"
    ],
}


@pytest.mark.parametrize("source", SIGNATURES)
def test_signatures(tmp_path: Path, source: str) -> None:
    rows = rows_in(made(tmp_path, {"m.py": source}))
    shown = [row.answer for row in rows if row.kind == "signature"]
    name = "pack.m.C" if "by new" in source else "pack.m.C.f" if "class" in source else "pack.m.f"
    assert shown == [f"```python\n{name}{each}\n```" for each in SIGNATURES[source]]


@pytest.mark.parametrize(
    ("doc", "signature", "rest"),
    [
        ("f(a, b=1)\n\nDoes it.", "(a, b=1)", "Does it."),
        ("f(a,\n  b=1) -> int\n\nDoes it.", "(a,\n  b=1) -> int", "Does it."),
        ("x.f(a)\n\nDoes it.", "(a)", "Does it."),
        ("f(\n    a,\n)\n--\n\nf(a)\n\nDoes it.", "(\n    a,\n)", "Does it."),
        ("f(a) -> int -- Does it.\n\nMore.", "(a) -> int", "Does it.\n\nMore."),
        ("f(a) does it.", "", "f(a) does it."),
        ("f(a", "", "f(a"),
        ("The f(a) of it.", "", "The f(a) of it."),
        ("", "", ""),
    ],
)
def test_the_signature_at_the_start_of_a_docstring(doc: str, signature: str, rest: str) -> None:
    assert split_signature("f", doc) == (signature, rest)


def test_add_newdoc_documents_what_is_written_in_c(tmp_path: Path) -> None:
    calls = """
        add_newdoc("pack._c", "make", "make(a, b=1)\\n\\nMakes something of it.")
        add_newdoc("pack._c", "Thing", "A thing that is made.")
        add_newdoc("pack._c", "Thing", ("size", "How large the thing is."))
        add_newdoc("pack._c", "Thing", [("grow", "grow(by)\\n\\nMakes it larger.")])
        add_newdoc("other", "x", "Something of somebody else.")
        add_newdoc("pack._c", name, "Nobody knows whose this is.")
    """
    files = {
        "__init__.py": "from ._c import make, Thing",
        "_c.py": "",
        "_docs.py": "\n".join(line.strip() for line in calls.splitlines()),
    }
    rows = rows_in(made(tmp_path, files))
    assert [(row.kind, row.provenance["object"], row.answer) for row in rows] == [
        ("describe", "pack.make", "Makes something of it."),
        ("signature", "pack.make", "```python\npack.make(a, b=1)\n```"),
        ("describe", "pack.Thing", "A thing that is made."),
        ("describe", "pack.Thing.size", "How large the thing is."),
        ("describe", "pack.Thing.grow", "Makes it larger."),
        ("signature", "pack.Thing.grow", "```python\npack.Thing.grow(by)\n```"),
    ]
    assert {row.provenance["file"] for row in rows} == {"pack/_docs.py"}
    assert rows[0].question == "Describe the function `pack.make`."


def test_a_stub_gives_signatures_where_there_is_no_source(tmp_path: Path) -> None:
    files = {
        "c.pyi": "from typing import overload as o\n"
        "@o\ndef f(a: int) -> int: ...\n@o\ndef f(a: str) -> str: ...",
        "d.pyi": "def g(a: int) -> int: ...",
        "d.py": "def g(a):\n  'Does it in Python.'",
    }
    assert [row.answer for row in rows_in(made(tmp_path, files))] == [
        "```python\npack.c.f(a: int) -> int\npack.c.f(a: str) -> str\n```",
        "Does it in Python.",
        "```python\npack.d.g(a)\n```",
    ]


def test_nothing_that_is_read_is_run(tmp_path: Path) -> None:
    package = made(tmp_path, {"a.py": f"open('made', 'w')\nraise SystemExit\ndef f(a):\n  {DOC}"})
    before = set(sys.modules)
    assert names(rows_in(package)) == {"pack.a.f"}
    assert not [name for name in set(sys.modules) - before if name.startswith("pack")]
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"def f(:", "line 1: "),
        (b"\0", "null bytes"),
        (b"# coding: nonsense\n", "nonsense"),
        ("# coding: utf-8\nx = 'é'".encode("latin-1"), "utf-8"),
        (b"(" * 5000, "."),
        (b"-" * 100_000 + b"1", "."),
    ],
)
def test_a_file_that_is_no_python_is_named_and_passed_over(tmp_path: Path, source, said) -> None:
    package = made(tmp_path, {"good.py": f"def f(a):\n  {DOC}"})
    (package / "bad.py").write_bytes(source)
    rows, _, reader = read(package)
    assert names(rows) == {"pack.good.f"}
    (fault,) = reader.unread
    assert fault.startswith("pack/bad.py: ")
    assert re.search(said, fault.removeprefix("pack/bad.py: "))


def test_a_docstring_nested_beyond_measure_is_named_and_passed_over(tmp_path: Path) -> None:
    doc = "\n".join(f"{' ' * depth}.. note::" for depth in range(1, 400))
    source = f"def deep():\n  '''Deep.\n{doc}\n  '''\ndef f(a):\n  {DOC}"
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # libraries that another test has imported may have raised it
    try:
        rows, _, reader = read(made(tmp_path, {"m.py": source}))
    finally:
        sys.setrecursionlimit(limit)
    assert names(rows) == {"pack.m.f"}
    assert [each[: len("pack/m.py, line 1")] for each in reader.unread] == ["pack/m.py, line 1"]


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(): 'No.'", "too short"),
        ("def f(): 'Does it with %(name)s as it is.'", "placeholder"),
        ("def f(): 'Does it with \\ud800 in it.'", "not text"),
        ("def f(): 'Does it with \\x00 in it.'", "not text"),
        (f"def f(): 'Does it {'very ' * 500} well.'", "too long"),
        ("def f(): 'Does it all.'\ndef g(): 'Does it all.'", "duplicate"),
    ],
)
def test_what_is_left_out_is_counted(tmp_path: Path, source: str, reason: str) -> None:
    rows, sieve, _ = read(made(tmp_path, {"m.py": source}))
    assert len(rows) == (reason == "duplicate")
    assert +sieve.left_out == {reason: 1}


def test_a_long_text_is_cut_after_a_paragraph(tmp_path: Path) -> None:
    source = "def f():\n  '''First of all.\n\n  Second, and last.\n\n  Third and long.\n  '''"
    rows = rows_in(made(tmp_path, {"m.py": source}), max_characters=35)
    assert [row.answer for row in rows] == ["First of all.\n\nSecond, and last."]


def test_the_standard_library_in_rows_that_train_takes() -> None:
    for name in ("json", "collections"):
        rows = rows_in(Path(name))
        assert len(rows) > 25
        for row in rows:
            assert set(parse_row(parse_object(row.line())).unused) <= {
                "category", "lane", "task_family",
            }  # fmt: skip
            assert row.provenance["licence"] == "PSF-2.0"
            assert str(row.provenance["file"]).startswith(name)
    assert "json.JSONDecoder" in names(rows_in(Path("json")))


@pytest.mark.long
def test_all_that_is_installed_is_read(tmp_path: Path) -> None:
    for name in ("stdlib", "numpy", "pydantic", "rich", "pytest"):
        rows, _, reader = read(Path(name))
        assert len(rows) > 300
        assert reader.unread == []
        assert len({row.question for row in rows}) == len(rows)
        for row in rows:
            parse_row(parse_object(row.line()))
