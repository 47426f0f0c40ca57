"""Split a docstring into words, parameters, returns, raises, examples and deprecation.

The sections of numpy's, Google's and Sphinx's styles are found by griffe; which style it is, is
decided here, for one docstring at a time: underlined headings are numpy's, fields such as
`:param x:` Sphinx's, `Args:` with an indented block Google's, and anything else is words alone.
What is given back is the docstring's own markup; `plain.py` makes text of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any, Literal, TypeAlias

import griffe

Style: TypeAlias = Literal["numpy", "sphinx", "google", "words"]

_NUMPY = re.compile(
    r"^(?:(?:Other )?Parameters|Returns|Yields|Raises|Attributes|Methods|Examples?|Notes|See Also"
    r"|References|Warnings?|Receives)[ \t]*\n-{3,}[ \t]*$",
    re.M,
)
_FIELD = re.compile(
    r"^:(?:param|parameter|arg|argument|key|keyword|type|returns?|rtype|raises?|except|exception"
    r"|var|ivar|cvar|vartype)\b[^:\n]{0,200}:"
)
_ANY_FIELD = re.compile(r"^:\w[^:\n`]{0,200}:(?=\s|$)")
_GOOGLE = re.compile(
    r"^(?:Args|Arguments|Params|Parameters|Keyword Args|Keyword Arguments|Other Parameters"
    r"|Attributes|Returns|Yields|Raises|Exceptions|Examples?):[ \t]*\n(?:[ \t]*\n)?[ \t]+\S",
    re.M,
)
_REST_HEADING = re.compile(r"^\S[^\n]{0,80}\n([-=~^])\1{2,}[ \t]*$", re.M)


# What it raises on texts that nobody writes on purpose; their words are taken as they are.
_FAULTS_OF_GRIFFE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_REMARKS = ("note", "warning", "important", "tip", "caution")


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter, an attribute, something returned or yielded, or an exception (no name)."""

    name: str
    type: str
    text: str


@dataclass
class Documented:
    """A parsed docstring; texts and lists are empty where a section is missing."""

    signature: str = ""
    text: str = ""
    parameters: list[Item] = field(default_factory=list)
    attributes: list[Item] = field(default_factory=list)
    returns: list[Item] = field(default_factory=list)
    yields: list[Item] = field(default_factory=list)
    raises: list[Item] = field(default_factory=list)
    examples: str = ""
    deprecated: str = ""


def read_docstring(name: str, doc: str) -> Documented:
    """Split a docstring into its parts; `name` is the last part of its owner's."""
    signature, rest = split_signature(name, doc)
    found, style = Documented(signature), style_of(rest)
    try:
        sections = _sections(style, rest)
    except _FAULTS_OF_GRIFFE:
        sections = _sections("words", rest)
    found.text = "\n\n".join(words for each in sections if (words := _take(each, found)))
    if style == "words":
        found.text = _before_headings(found.text)
    return found


def _sections(style: Style, doc: str) -> Iterable[Any]:
    if style == "numpy":
        return griffe.parse_numpy(griffe.Docstring(doc), warnings=False) or ()
    if style == "google":
        options = {"returns_multiple_items": False, "returns_named_value": False}
        return griffe.parse_google(griffe.Docstring(doc), warnings=False, **options) or ()
    if style == "sphinx":
        words, fields = _fields_apart(doc)
        sections = griffe.parse_sphinx(griffe.Docstring(fields), warnings=False)
        return [griffe.DocstringSectionText(words), *sections]
    return [griffe.DocstringSectionText(doc)]


def _take(section: Any, found: Documented) -> str | None:
    """Put a section where it belongs; return its words if it is text."""
    kind = section.kind.value
    if kind == "text":
        return str(section.value)
    if kind == "examples":
        found.examples = _and(found.examples, "\n\n".join(text for _, text in section.value))
    elif kind == "deprecated":
        value = section.value
        since = f"Deprecated since version {value.version}: " if value.version else ""
        found.deprecated = f"{since}{value.description}"
    elif kind == "admonition":
        return _admonition(section, found)
    elif kind in _LISTS:
        getattr(found, kind.removeprefix("other ")).extend(map(_item, section.value))
    return None


_LISTS = {"parameters", "other parameters", "attributes", "returns", "yields", "raises"}


def style_of(doc: str) -> Style:
    if _NUMPY.search(doc):
        return "numpy"
    if any(_FIELD.match(line) for line in doc.split("\n")):
        return "sphinx"
    return "google" if _GOOGLE.search(doc) else "words"


def _item(value: Any) -> Item:
    return Item(
        getattr(value, "name", None) or "", str(value.annotation or ""), value.description or ""
    )


def _admonition(section: Any, found: Documented) -> str | None:
    """Google's `Example:` and `Deprecated:`; notes are words; the rest ("See Also") is left out.

    numpy's "Notes" is a chapter of the text; a note or a warning is given as a directive.
    """
    kind, text = str(section.value.kind), str(section.value.description)
    if kind in ("example", "examples"):
        found.examples = _and(found.examples, text)
    elif kind == "deprecated":
        found.deprecated = text
    elif kind == "notes" or section.title == "Notes":
        return text
    elif kind.removesuffix("s") in _REMARKS:
        return f".. {kind.removesuffix('s')}::\n\n{indent(text, '   ')}"
    return None


def _fields_apart(doc: str) -> tuple[str, str]:
    """Split prose from fields; griffe adds prose after the last field to that field."""
    words: list[str] = []
    fields: list[str] = []
    in_field = False
    for line in doc.split("\n"):
        if _ANY_FIELD.match(line):
            in_field = True
        elif line.strip() and not line.startswith((" ", "\t")):
            in_field = False
        (fields if in_field else words).append(line)
    return "\n".join(words).strip("\n"), "\n".join(fields)


def _before_headings(text: str) -> str:
    """A module's docstring may be a whole chapter: what comes before its second heading."""
    headings = [found.start() for found in _REST_HEADING.finditer(text)]
    cut = next((at for at in headings if at > 0), len(text))
    return text[:cut].rstrip()


def _and(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first else second


def items_text(items: Sequence[Item], render: Callable[[str], str]) -> str:
    """Several items as a list, one alone as words."""
    lines = [line for each in items if (line := _described(each, render))]
    return lines[0] if len(lines) == 1 else "\n".join(f"- {_nested(line)}" for line in lines)


def _described(item: Item, render: Callable[[str], str]) -> str:
    text = render(item.text)
    head = f"`{item.name}`" if item.name else ""
    if item.type:
        kind = render(item.type)
        head = f"{head} ({kind})" if head else kind
    return f"{head}: {text}" if head and text else head or text


def _nested(text: str) -> str:
    return text.replace("\n", "\n  ")


def split_signature(name: str, doc: str) -> tuple[str, str]:
    """Split the signature off with which a docstring begins.

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
_MAX_LINES = 30
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
