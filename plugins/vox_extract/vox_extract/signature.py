"""Signatures as text: of a function's node, and of the line with which a docstring may begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

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
