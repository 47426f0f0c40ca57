"""`add_newdoc` calls: how numpy documents what is written in C.

    add_newdoc('numpy._core.multiarray', 'array', ...…...)
    add_newdoc('numpy._core.multiarray', 'ndarray', ('T', ...…...))
    add_newdoc('numpy._core.multiarray', 'ndarray', [('T', ...…...), …])

    _array_method_doc('all', 'axis=None', ...…...)       since numpy 2.4, for what ndarray has

Calls whose arguments are anything but texts are passed over.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class NewDoc:
    """A docstring for `name` (`ndarray.T`) in the module `place`."""

    place: str
    name: str
    doc: str
    line: int


def newdocs_of(statements: Iterable[ast.stmt], module: str) -> list[NewDoc]:
    """What the calls among the statements document, of the package that `module` belongs to."""
    package = module.partition(".")[0]
    return [
        each
        for statement in statements
        for each in _documented(statement)
        if each.place.partition(".")[0] == package and _NAME.fullmatch(each.name)
    ]


def _documented(statement: ast.stmt) -> Iterator[NewDoc]:
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Name(id="add_newdoc") | ast.Attribute(attr="add_newdoc"),
                args=[ast.Constant(value=str(place)), ast.Constant(value=str(name)), what, *_],
            )
        ):
            for member, doc in _texts(what):
                full = f"{name}.{member}" if member else name
                yield NewDoc(place, full, inspect.cleandoc(doc), statement.lineno)
        case ast.Expr(
            value=ast.Call(
                func=ast.Name(id="_array_method_doc"),
                args=[ast.Constant(value=str(name)), _, ast.Constant(value=str(doc))],
            )
        ):
            yield NewDoc(
                "numpy._core.multiarray", f"ndarray.{name}", inspect.cleandoc(doc), statement.lineno
            )


def _texts(what: ast.expr) -> Iterator[tuple[str, str]]:
    """Member, empty for the thing itself, and its text."""
    match what:
        case ast.Constant(value=str(doc)):
            yield "", doc
        case ast.Tuple(elts=[ast.Constant(value=str(member)), ast.Constant(value=str(doc))]):
            yield member, doc
        case ast.List(elts=several):
            for each in several:
                if isinstance(each, ast.Tuple):
                    yield from _texts(each)
