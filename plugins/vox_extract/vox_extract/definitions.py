"""List what a library's files define, each thing under its public name, without importing it.

griffe parses the files and follows imports, stars and `__all__`. Read are modules, classes,
functions, methods and properties, and the calls with which numpy documents what is written in C:

    add_newdoc('numpy._core.multiarray', 'array', "...")
    add_newdoc('numpy._core.multiarray', 'ndarray', ('T', "..."))
    add_newdoc('numpy._core.multiarray', 'ndarray', [('T', "..."), ...])
    _array_method_doc('all', 'axis=None', "...")       since numpy 2.4, for methods of ndarray

A thing's public name is its own, unless that is private, or a package above its module offers it;
then the shortest, and of several the one whose module has the name of the defining one. A name
with a part that begins with an underscore is private.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import griffe

from vox_extract.locate import Library, Reader, SourceFile

Kind: TypeAlias = Literal["module", "class", "function", "method", "attribute", "object"]
Thing: TypeAlias = griffe.Object | griffe.Alias

WIDTH = 88

_PROPERTIES = {"property", "cached_property", "abstractproperty"}
_NO_DEFINITIONS = {"setter", "deleter", "overload"}
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_K = griffe.ParameterKind


@dataclass(frozen=True, slots=True)
class Definition:
    """Something that has a name.

    Args:
        name: the public one, dotted; private where there is none.
        doc: its docstring; empty without one.
        signatures: `(a, b=1) -> int`, one for each overload of a stub; without self.
        deprecated: the message of a `@deprecated` decorator (PEP 702).
        init_doc: of a class: the docstring of its `__init__`.
        stub: it stands in a `.pyi` file.
    """

    name: str
    kind: Kind
    line: int
    doc: str
    signatures: tuple[str, ...] = ()
    deprecated: str = ""
    init_doc: str = ""
    stub: bool = False


def definitions(library: Library, reader: Reader) -> Iterator[tuple[SourceFile, Definition]]:
    """Everything the library's files define, in the order of files and lines."""
    tree = _Tree()
    with griffe.logger.disable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backslashes in somebody else's strings
        for file in sorted(library.files, key=lambda each: each.module):
            reader.read(file, partial(tree.add, file))
        tree.resolve()
        for file in library.files:
            for each in sorted(tree.of(file), key=lambda found: (found.line, found.name)):
                yield file, each


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") for part in dotted.split("."))


class _First(griffe.Extension):
    """Keep the first documented definition of a name; griffe has the last, often one in C."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], griffe.Object] = {}

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Note an object that griffe has just made."""
        if not isinstance(obj, griffe.Class | griffe.Function) and "property" not in obj.labels:
            return
        first = self._found.get(key := (id(obj.parent), obj.name))
        inside = isinstance(obj.parent, griffe.Function)
        if not inside and not _marks(obj) & _NO_DEFINITIONS and not (first and first.docstring):
            self._found[key] = obj

    def restore(self) -> None:
        """Put them into their modules and classes."""
        for each in self._found.values():
            _owner(each).members[each.name] = each


class _Tree:
    """The modules of one library, by their dotted names."""

    def __init__(self) -> None:
        self._collection = griffe.ModulesCollection()
        self._modules: dict[SourceFile, griffe.Module] = {}
        self._calls: dict[SourceFile, ast.Module] = {}
        self._documented: dict[SourceFile, list[Definition]] = {}
        self._shadowed: list[griffe.Alias] = []

    def add(self, file: SourceFile, source: bytes) -> None:
        """Parse a file and give it its place below its package.

        Raises:
            SyntaxError, ValueError, RecursionError, MemoryError: it is no Python of this version.
        """
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        code, first = source.decode(encoding), _First()
        parent, _, name = file.module.rpartition(".")
        module = griffe.visit(
            name,
            file.path,
            code,
            extensions=griffe.Extensions(first),
            parent=self._package(parent) if parent else None,
            modules_collection=self._collection,
        )
        first.restore()
        if file.path.suffix == ".pyi":
            _join_overloads(module)
        for each in module.members.values():
            each.runtime = True  # a star import hands on what is defined for type checkers
        self._place(module)
        self._modules[file] = module
        if "add_newdoc" in code:
            self._calls[file] = ast.parse(code)

    def resolve(self) -> None:
        """Follow imports, so that each thing has all of its names."""
        made = {file: list(self._document(each)) for file, each in self._calls.items()}
        loader = griffe.GriffeLoader(modules_collection=self._collection)
        for module in self._modules.values():
            loader.expand_exports(module)
        loader.resolve_aliases(implicit=True, external=False)
        for alias in self._shadowed:
            with suppress(KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
                self._collection.get_member(alias.target_path).aliases[alias.path] = alias
        for file, several in made.items():
            self._documented[file] = [_documented(*each) for each in several]

    def of(self, file: SourceFile) -> Iterator[Definition]:
        """Yield the definitions in a file."""
        if (module := self._modules.get(file)) is None:
            return
        stub = file.path.suffix == ".pyi"
        yield Definition(file.module, "module", 1, _doc(module), stub=stub)
        for each in module.members.values():
            if isinstance(each, griffe.Object) and not isinstance(each, griffe.Module | _InC):
                yield from _definitions(each, _public_name(each), stub)
        yield from self._documented.get(file, ())

    def _package(self, path: str) -> griffe.Module:
        """The module of that name, made where no file defines it."""
        with suppress(KeyError):
            found = self._collection.get_member(path)
            if isinstance(found, griffe.Module):
                return found
        above, _, name = path.rpartition(".")
        parent = self._package(above) if above else None
        made = griffe.Module(name, filepath=[], parent=parent, modules_collection=self._collection)
        self._place(made)
        return made

    def _place(self, module: griffe.Module) -> None:
        """Put it into its package, where a function may have the same name."""
        members = (module.parent or self._collection).members
        if isinstance(before := members.get(module.name), griffe.Alias):
            self._shadowed.append(before)
        members[module.name] = module

    def _document(self, tree: ast.Module) -> Iterator[tuple[griffe.Class, int]]:
        """Add what `add_newdoc` documents in modules of this library, each with its line."""
        for call in ast.walk(tree):
            for place, name, doc in _newdocs(call):
                if place.partition(".")[0] in self._collection.members and _NAME.fullmatch(name):
                    owner: Any = self._package(place)
                    *outer, last = name.split(".")
                    for each in outer:
                        owner = _member(owner, each)
                    made = _member(owner, last)
                    made.docstring = griffe.Docstring(doc)
                    yield made, call.lineno  # type: ignore[attr-defined]  # of a Call


class _InC(griffe.Class):
    """Something that `add_newdoc` documents."""


def _member(owner: griffe.Module | griffe.Class, name: str) -> griffe.Class:
    if not isinstance(found := owner.members.get(name), griffe.Class):
        # By its line griffe decides whether a star import replaces it.
        found = _InC(name, lineno=sys.maxsize)
        owner.set_member(name, found)
    return found


def _documented(thing: griffe.Class, line: int) -> Definition:
    top = thing
    while isinstance(owner := _owner(top), griffe.Class):
        top = owner
    rest = thing.path.removeprefix(top.path)
    kind: Kind = "attribute" if rest else "class" if thing.members else "object"
    return Definition(f"{_public_name(top)}{rest}", kind, line, _doc(thing))


def _newdocs(call: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Module, name (`ndarray.T`) and docstring of each thing that a call documents."""
    match call:
        case ast.Call(
            func=ast.Name(id="add_newdoc") | ast.Attribute(attr="add_newdoc"),
            args=[ast.Constant(value=str(place)), ast.Constant(value=str(name)), what, *_],
        ):
            for each in what.elts if isinstance(what, ast.List) else [what]:
                match each:
                    case ast.Constant(value=str(doc)):
                        yield place, name, inspect.cleandoc(doc)
                    case ast.Tuple(elts=[ast.Constant(value=str(m)), ast.Constant(value=str(doc))]):
                        yield place, f"{name}.{m}", inspect.cleandoc(doc)
        case ast.Call(
            func=ast.Name(id="_array_method_doc"),
            args=[ast.Constant(value=str(name)), _, ast.Constant(value=str(doc))],
        ):
            yield "numpy._core.multiarray", f"ndarray.{name}", inspect.cleandoc(doc)


def _join_overloads(owner: griffe.Module | griffe.Class) -> None:
    """Make one function of a stub's overloads, which have no implementation."""
    for name, several in list(owner.overloads.items()):
        if several and name not in owner.members:
            several[-1].overloads = several
            owner.set_member(name, several[-1])
    for each in owner.members.values():
        if isinstance(each, griffe.Class):
            _join_overloads(each)


# --- names ----------------------------------------------------------------------------------------


def _public_name(thing: griffe.Object) -> str:
    """The dotted name under which users know something at the top level of a module."""
    own, module = thing.path, _owner(thing).path
    names = [
        path
        for path, alias in thing.aliases.items()
        if not is_private(path)
        and _is_offered(alias)
        and (is_private(own) or module.startswith(f"{path.rpartition('.')[0]}."))
    ]
    if not is_private(own):
        names.append(own)
    stem = module.rpartition(".")[2].strip("_").removesuffix("_impl")
    return min(
        names,
        key=lambda each: (each.count("."), stem not in each.split(".")[:-1], each),
        default=own,
    )


def _is_offered(alias: griffe.Alias) -> bool:
    """Whether the importing module wants users to take the name from there."""
    into = alias.parent
    if not isinstance(into, griffe.Module):
        return False
    if alias.wildcard_imported or not into.exports:
        return alias.wildcard_imported or into.is_init_module
    return alias.name in into.exports


# --- definitions ----------------------------------------------------------------------------------


def _definitions(thing: Thing, name: str, stub: bool) -> Iterator[Definition]:
    """A class with its members, a function or a property; nothing of other things."""
    line, doc = thing.lineno or 1, _doc(thing)
    if isinstance(thing, griffe.Class):
        made_by = [thing.members.get(each) for each in ("__init__", "__new__")]
        init = next((each for each in made_by if isinstance(each, griffe.Function)), None)
        signatures = [_signature(init, returns=False)] if init else []
        said = _doc(init) if init else ""
        yield Definition(name, "class", line, doc, (*signatures,), _deprecated(thing), said, stub)
        for each in thing.members.values():
            if not each.is_alias:
                yield from _definitions(each, f"{name}.{each.name}", stub)
    elif isinstance(thing, griffe.Function) and not _marks(thing) & _PROPERTIES:
        kind: Kind = "method" if _owner(thing).is_class else "function"
        several = (stub and thing.overloads) or [thing]
        signatures = list(dict.fromkeys(map(_signature, several)))
        yield Definition(name, kind, line, doc, (*signatures,), _deprecated(thing), stub=stub)
    elif "property" in thing.labels or isinstance(thing, griffe.Function):
        yield Definition(name, "attribute", line, doc, stub=stub)


def _doc(thing: Thing) -> str:
    return thing.docstring.value if thing.docstring else ""


def _owner(thing: Thing) -> griffe.Module | griffe.Class:
    assert isinstance(thing.parent, griffe.Module | griffe.Class)
    return thing.parent


def _marks(thing: Thing) -> set[str]:
    """The last names of its decorators: libraries have a `cached_property` of their own."""
    decorators = getattr(thing, "decorators", ())
    return {each.callable_path.rpartition(".")[2] for each in decorators}


def _deprecated(thing: griffe.Class | griffe.Function) -> str:
    for each in thing.decorators:
        match each.value:
            case griffe.ExprCall(arguments=[str(text), *_]) if (
                each.callable_path.rpartition(".")[2] == "deprecated"
            ):
                return str(ast.literal_eval(text))
    return ""


def _signature(function: griffe.Function, *, returns: bool = True) -> str:
    """`(a, *, b: int = 1) -> str`, on one line if it fits, else one parameter a line."""
    given = list(function.parameters)
    bound = _owner(function).is_class and "staticmethod" not in function.labels
    if bound and given and given[0].kind not in (_K.var_positional, _K.var_keyword):
        del given[0]
    parameters = list(_parameters(given))
    end = f" -> {function.returns}" if returns and function.returns else ""
    line = f"({', '.join(parameters)}){end}"
    if len(line) <= WIDTH - len(function.name):
        return line
    return "\n".join(["(", *(f"    {each}," for each in parameters), f"){end}"])


def _parameters(given: Sequence[griffe.Parameter]) -> Iterator[str]:
    stars: dict[Any, str] = {_K.var_positional: "*", _K.var_keyword: "**"}
    before: griffe.ParameterKind | None = None
    for each in given:
        if before is _K.positional_only and each.kind is not before:
            yield "/"
        if each.kind is _K.keyword_only and before not in (_K.keyword_only, _K.var_positional):
            yield "*"
        text = f"{stars.get(each.kind, '')}{each.name}"
        text += f": {each.annotation}" if each.annotation is not None else ""
        if each.default is not None and each.kind not in stars:
            text += f" = {each.default}" if each.annotation is not None else f"={each.default}"
        yield text
        before = each.kind
    if before is _K.positional_only:
        yield "/"
