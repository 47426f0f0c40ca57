"""What one Python file defines, documents, imports and exports: `ast` alone, nothing is run.

Read are modules, classes, functions, methods and properties with their docstrings and signatures,
and the `add_newdoc(place, name, doc)` calls with which numpy documents what is written in C:

    add_newdoc('numpy._core.multiarray', 'array', "...")
    add_newdoc('numpy._core.multiarray', 'ndarray', ('T', "..."))
    add_newdoc('numpy._core.multiarray', 'ndarray', [('T', "..."), ...])
    _array_method_doc('all', 'axis=None', "...")       since numpy 2.4, for what ndarray has

Calls whose arguments are anything but texts are passed over. A `.pyi` file is a module whose
functions have signatures and, as a rule, no words. Not read: what is defined inside functions, what
`exec`, `setattr` or `__doc__ = ...` make.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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


WIDTH = 88
_MAX_LINES = 30
_INDENT = "    "


def signature_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool, returns: bool = True
) -> str:
    """`(a, *, b: int = 1) -> str`, on one line if it fits, else one parameter a line.

    Args:
        bound: leave out the first parameter: self or cls.
        returns: with what it returns.
    """
    parameters = list(_parameters(node.args))
    if bound and parameters and not parameters[0].startswith("*"):
        del parameters[0]
        if parameters[:1] == ["/"]:
            del parameters[0]
    end = f" -> {ast.unparse(node.returns)}" if returns and node.returns else ""
    line = f"({', '.join(parameters)}){end}"
    if len(line) <= WIDTH - len(node.name):
        return line
    return "\n".join(["(", *(f"{_INDENT}{each}," for each in parameters), f"){end}"])


def _parameters(given: ast.arguments) -> Iterator[str]:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for index, (parameter, default) in enumerate(zip(positional, defaults, strict=True), start=1):
        yield _parameter(parameter, default)
        if index == len(given.posonlyargs):
            yield "/"
    if given.vararg:
        yield f"*{_parameter(given.vararg, None)}"
    elif given.kwonlyargs:
        yield "*"
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(parameter, default)
    if given.kwarg:
        yield f"**{_parameter(given.kwarg, None)}"


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    if parameter.annotation is None:
        return parameter.arg + (f"={ast.unparse(default)}" if default else "")
    text = f"{parameter.arg}: {ast.unparse(parameter.annotation)}"
    return text + (f" = {ast.unparse(default)}" if default else "")


def split_signature(name: str, doc: str) -> tuple[str, str]:
    """The signature with which a docstring begins, and the rest.

    The docs of things written in C begin with `name(…)`, which may go over several lines, and may
    have the form of Argument Clinic before it, which ends in a line of two dashes. `name` is the
    last part of the object's name; `a.name(…)` and `S.name(…)` are understood, and lose their
    first part. The signature begins with its bracket; it is empty where there is none.
    """
    lines = doc.split("\n")
    if "--" in lines[:_MAX_LINES] and lines[0].startswith(f"{name}("):
        cut = lines.index("--")
        _, rest = split_signature(name, "\n".join(lines[cut + 1 :]).lstrip("\n"))
        return "\n".join(lines[:cut]).removeprefix(name), rest
    before, found, _ = lines[0].partition(f"{name}(")
    if not found or not _OWNER.fullmatch(before):
        return "", doc
    for count in range(1, min(len(lines), _MAX_LINES) + 1):
        signature, line = "\n".join(lines[:count]), lines[count - 1]
        if not line.strip():
            break
        if signature.count("(") == signature.count(")"):
            return _whole(signature, "\n".join(lines[count:]), doc)
    return "", doc


_OWNER = re.compile(r"(\w{1,40}\.)*")
_ENDS = re.compile(r"\)(\s*(->|=>)\s*[^\n]{1,80})?$")
_WITH_WORDS = re.compile(
    r"(\([^\n]{0,200}\)(?:\s*->\s*[\w\[\], |.]{1,60}?)?)\s+(?:--|-)\s+(\S.*)", re.S
)


def _whole(signature: str, rest: str, doc: str) -> tuple[str, str]:
    """The signature, if what stands in its lines is one; `f(x) -> int -- Words` is, with words."""
    start = signature.index("(")
    if _ENDS.search(signature) and " -- " not in signature:
        return signature[start:], rest.lstrip("\n")
    if found := _WITH_WORDS.match(f"{signature[start:]}\n{rest}"):
        return found[1], found[2]
    return "", doc
