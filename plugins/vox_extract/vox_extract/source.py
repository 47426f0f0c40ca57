"""What one Python file defines, documents, imports and exports: `ast` alone, nothing is run.

Read are modules, classes, functions, methods and properties with their docstrings and signatures,
and the `add_newdoc(place, name, doc)` calls with which numpy documents what is written in C. A
`.pyi` file is read as a module whose functions have signatures and, as a rule, no words.

Not read: what is defined inside functions, what `exec`, `setattr` or `__doc__ = …` make.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vox_extract.newdocs import NewDoc, newdocs_of
from vox_extract.signature import signature_of

Kind: TypeAlias = Literal["module", "class", "function", "method", "attribute", "object"]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

MAX_BYTES = 10_000_000

_PROPERTIES = {"property", "cached_property", "abstractproperty"}
_ACCESSORS = {"setter", "deleter"}


class Unparsable(Exception):
    """A file that is no Python of this version."""


@dataclass(frozen=True, slots=True)
class Definition:
    """Something that has a name.

    Args:
        module: where it is defined.
        name: within the module: `Class.method`; empty for the module itself.
        doc: its docstring; empty without one.
        signatures: `(a, b=1) -> int`, one for each overload; without self.
        deprecated: the message of a `@deprecated` decorator.
        init_doc: of a class: the docstring of its `__init__`.
        stub: it stands in a `.pyi` file.
    """

    module: str
    name: str
    kind: Kind
    line: int
    doc: str
    signatures: tuple[str, ...] = ()
    deprecated: str = ""
    init_doc: str = ""
    stub: bool = False


@dataclass(frozen=True, slots=True)
class Import:
    """`from module import name as bound`; `*` for all names."""

    module: str
    name: str
    bound: str


@dataclass
class Module:
    """What a file says.

    Args:
        bound: names that it binds in any way at its top level.
        exports: the strings of `__all__`; None without one.
        exports_of: modules whose `__all__` is added to its own.
        whole: `exports` and `exports_of` are all that `__all__` is made of.
    """

    name: str
    is_package: bool
    definitions: list[Definition] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    exports: list[str] | None = None
    exports_of: list[str] = field(default_factory=list)
    whole: bool = True


def parse(source: bytes, module: str, *, is_package: bool = False, stub: bool = False) -> Module:
    """Read a file.

    Raises:
        Unparsable: with what the parser says.
    """
    if len(source) > MAX_BYTES:
        raise Unparsable(f"it has more than {MAX_BYTES:,} bytes")
    found = Module(module, is_package)
    try:
        with warnings.catch_warnings():  # of backslashes in somebody else's strings
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            _read(tree, found, stub)
    except SyntaxError as error:
        place = f"line {error.lineno}: " if error.lineno else ""
        raise Unparsable(f"{place}{error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        raise Unparsable(str(error) or "it is nested too deeply") from None
    return found


def _read(tree: ast.Module, found: Module, stub: bool) -> None:
    doc = ast.get_docstring(tree) or ""
    found.definitions.append(Definition(found.name, "", "module", 1, doc, stub=stub))
    found.definitions += _members(tree.body, found.name, "", stub)
    for statement in _flat(tree.body):
        _bind(statement, found)
    found.definitions += _documented_elsewhere(newdocs_of(_flat(tree.body), found.name))
    found.bound |= {each.name for each in found.definitions if each.name.isidentifier()}


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those under `if`, `try` and `with`; not what runs as a script."""
    for statement in body:
        yield statement
        match statement:
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                continue
            case ast.If(body=body, orelse=orelse):
                yield from _flat([*body, *orelse])
            case ast.Try() | ast.TryStar():
                handled = [each for handler in statement.handlers for each in handler.body]
                yield from _flat(
                    [*statement.body, *handled, *statement.orelse, *statement.finalbody]
                )
            case ast.With(body=body):
                yield from _flat(body)


# --- definitions ----------------------------------------------------------------------------------


def _members(
    body: Sequence[ast.stmt], module: str, within: str, stub: bool
) -> Iterator[Definition]:
    """What a module or a class defines; of one name, the first that is documented."""
    found: dict[str, list[Definition]] = {}
    for statement in _flat(body):
        for each in _definitions(statement, module, within, stub):
            found.setdefault(each.name, []).append(each)
    for several in found.values():
        yield _one_of(several)


def _one_of(several: Sequence[Definition]) -> Definition:
    """Overloads stand together; the signature of an implementation takes their place."""
    best = next((each for each in several if each.doc), several[-1])
    if not best.stub or len(several) == 1:
        return best
    signatures = tuple(dict.fromkeys(text for each in several for text in each.signatures))
    return Definition(
        best.module, best.name, best.kind, best.line, best.doc, signatures, best.deprecated,
        best.init_doc, stub=True,
    )  # fmt: skip


def _definitions(statement: ast.stmt, module: str, within: str, stub: bool) -> Iterator[Definition]:
    if isinstance(statement, ast.ClassDef):
        name = f"{within}{statement.name}"
        yield _class(statement, module, name, stub)
        yield from _members(statement.body, module, f"{name}.", stub)
    elif isinstance(statement, Function) and (found := _function(statement, module, within, stub)):
        yield found


def _class(node: ast.ClassDef, module: str, name: str, stub: bool) -> Definition:
    made_by = [
        each
        for each in _flat(node.body)
        if isinstance(each, Function) and each.name in ("__init__", "__new__")
    ]
    made_by.sort(key=lambda each: each.name != "__init__")
    init = next(iter(made_by), None)
    return Definition(
        module,
        name,
        "class",
        node.lineno,
        ast.get_docstring(node) or "",
        (signature_of(init, bound=True, returns=False),) if init else (),
        _deprecated(node),
        (ast.get_docstring(init) or "") if init else "",
        stub,
    )


def _function(node: Function, module: str, within: str, stub: bool) -> Definition | None:
    marks = {_last_name(each) for each in node.decorator_list}
    if marks & _ACCESSORS or ("overload" in marks and not stub):
        return None
    kind: Kind = "method" if within else "function"
    if marks & _PROPERTIES:
        kind = "attribute"
    bound = bool(within) and "staticmethod" not in marks
    signature = () if kind == "attribute" else (signature_of(node, bound=bound),)
    doc = ast.get_docstring(node) or ""
    name = f"{within}{node.name}"
    return Definition(module, name, kind, node.lineno, doc, signature, _deprecated(node), stub=stub)


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Call(func=func):
            return _last_name(func)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def _deprecated(node: Function | ast.ClassDef) -> str:
    """The message of PEP 702's decorator."""
    for each in node.decorator_list:
        match each:
            case ast.Call(args=[ast.Constant(value=str(message)), *_]) if (
                _last_name(each) == "deprecated"
            ):
                return message
    return ""


def _documented_elsewhere(calls: Sequence[NewDoc]) -> Iterator[Definition]:
    """What `add_newdoc` documents; a thing with members is a class."""
    classes = {(each.place, each.name.partition(".")[0]) for each in calls if "." in each.name}
    for call in calls:
        kind: Kind = "object"
        if "." in call.name:
            kind = "attribute"
        elif (call.place, call.name) in classes:
            kind = "class"
        yield Definition(call.place, call.name, kind, call.line, call.doc)


# --- imports and exports --------------------------------------------------------------------------


def _bind(statement: ast.stmt, found: Module) -> None:
    match statement:
        case ast.ImportFrom(names=names):
            origin = _origin(statement, found)
            for alias in names:
                bound = alias.asname or alias.name
                found.imports.append(Import(origin, alias.name, bound))
                found.bound.add(bound)
        case ast.Import(names=names):
            found.bound |= {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
            found.exports = []
            _export(value, found)
        case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
            found.exports = []
            _export(value, found)
        case ast.AugAssign(target=ast.Name(id="__all__"), value=value):
            _export(value, found)
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="__all__"), attr="extend" | "append"),
                args=[value],
            )
        ):
            _export(value, found)
        case ast.Assign(targets=targets):
            found.bound |= {each.id for each in targets if isinstance(each, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            found.bound.add(name)


def _origin(statement: ast.ImportFrom, found: Module) -> str:
    """The module that is imported from, with the dots of a relative import resolved."""
    if not statement.level:
        return statement.module or ""
    parts = found.name.split(".")
    up = statement.level - found.is_package
    base = parts[: len(parts) - up] if up else parts
    return ".".join([*base, *filter(None, [statement.module])])


def _export(value: ast.expr, found: Module) -> None:
    """One part of what `__all__` is made of."""
    found.exports = found.exports if found.exports is not None else []
    match value:
        case ast.Constant(value=str(name)):
            found.exports.append(name)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            for part in parts:
                _export(part, found)
        case ast.Starred(value=part):
            _export(part, found)
        case ast.BinOp(left=left, right=right, op=ast.Add() | ast.BitOr()):
            _export(left, found)
            _export(right, found)
        case ast.Call(func=ast.Name(id="list" | "set" | "sorted" | "tuple"), args=[part]):
            _export(part, found)
        case ast.Attribute(value=ast.Name(id=name), attr="__all__"):
            found.exports_of.append(name)
        case _:
            found.whole = False
