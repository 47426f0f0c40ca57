"""The markup of docstrings as plain text with code: paragraphs and blocks of code, in Markdown.

reStructuredText is what most docstrings are written in, more or less. Roles (``:func:`x` ``) and
literals become code in single backticks, links and footnotes their text, directives words
("New in version 1.2.") or nothing; doctests, literal blocks and code blocks are fenced. Lines of a
paragraph are joined; lists and whatever is laid out by hand stay as they are. Docstrings in
Markdown pass through.

This is no parser of reStructuredText: docutils refuses half of the docstrings there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import dedent

_DIRECTIVE = re.compile(r"\.\. +(?:\w+:)?([\w-]{1,40})::(?: +(.*))?$")
_EXPLICIT = re.compile(r"\.\.( |$)")
_FENCE = re.compile(r"(```+|~~~+)\s*([\w+-]*)")
_ITEM = re.compile(r"(?:[-*+•]|\(?\w{1,3}[.)]|:[^:\n]{1,60}:|>)\s")
_TABLE = re.compile(r"[=+-]{2,}[ =+-]*$|\|")
_UNDERLINE = re.compile(r"([=\-~^\"'*#+])\1{2,}$")

_CODE = {"code-block", "code", "sourcecode", "ipython", "testcode", "doctest"}
_SPOKEN = {
    "note": "Note",
    "warning": "Warning",
    "tip": "Tip",
    "hint": "Hint",
    "important": "Important",
    "caution": "Caution",
    "attention": "Attention",
    "danger": "Danger",
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
}
_VERSIONS = {"versionadded", "versionchanged", "deprecated"}


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, or code.

    Args:
        language: of code; None for a paragraph.
    """

    text: str
    language: str | None = None

    @property
    def is_code(self) -> bool:
        return self.language is not None

    def markdown(self) -> str:
        return self.text if self.language is None else fenced(self.text, self.language)


def fenced(code: str, language: str) -> str:
    """A fenced block of code, whose fence is longer than any within."""
    fence = "```"
    while fence in code:
        fence += "`"
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"


def plain(text: str) -> str:
    """The whole text in Markdown."""
    return join(blocks(text))


def join(several: Sequence[Block]) -> str:
    return "\n\n".join(each.markdown() for each in several)


def one_line(text: str) -> str:
    """A short text, such as a type, without markup or line ends."""
    return " ".join(inline(text).split())


def deprecations(text: str) -> str:
    """Return the text of the `deprecated` directives."""
    lines = text.split("\n")
    found: list[Block] = []
    for index, line in enumerate(lines):
        match = _DIRECTIVE.match(line.strip())
        if match and match[1] == "deprecated":
            body, _ = _indented(lines, index + 1, _depth(line))
            found += _directive("deprecated", match[2] or "", body)
    return join(found)


def blocks(text: str) -> list[Block]:
    """Paragraphs and code, in order; doctests that follow one another are one block."""
    joined: list[Block] = []
    for block in _blocks(dedent(text.expandtabs()).split("\n")):
        if not block.text.strip():
            continue
        last = joined[-1] if joined else None
        if last and last.language == block.language == "python" and _is_doctest(block.text):
            joined[-1] = Block(f"{last.text}\n\n{block.text}", "python")
        else:
            joined.append(block)
    return joined


def _blocks(lines: Sequence[str]) -> Iterator[Block]:
    index, literal = 0, False
    while index < len(lines):
        line = lines[index]
        if not line.strip():
            index += 1
            continue
        depth = _depth(line)
        if literal and depth:
            literal = False
            body, index = _indented(lines, index, 0)
            yield _code(body, "")
            continue
        literal = False
        found, index = _next(lines, index, depth)
        for block in found:
            if block.is_code or not block.text.endswith("::"):
                yield block
                continue
            literal = True
            words = block.text[:-2]
            yield Block(f"{words}:" if words and words == words.rstrip() else words.rstrip())


def _next(lines: Sequence[str], index: int, depth: int) -> tuple[list[Block], int]:
    """Parse the block that begins at a non-blank line; return it and the next line's index."""
    line = lines[index].strip()
    if line.startswith(">>> ") or line == ">>>":
        end = _until_blank(lines, index)
        return [_code(lines[index:end], "python")], end
    if fence := _FENCE.match(line):
        return _fenced(lines, index, fence)
    if _EXPLICIT.match(line):
        body, end = _indented(lines, index + 1, depth)
        directive = _DIRECTIVE.match(line)
        return (_directive(directive[1], directive[2] or "", body) if directive else []), end
    end = _until_blank(lines, index)
    for other in range(index + 1, end):  # code may follow words without a blank line
        start = lines[other].strip()
        if start.startswith(">>> ") or _DIRECTIVE.match(start) or _FENCE.match(start):
            end = other
            break
    return [_paragraph(lines[index:end])], end


def _until_blank(lines: Sequence[str], start: int) -> int:
    return next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))


def _indented(lines: Sequence[str], start: int, depth: int) -> tuple[list[str], int]:
    """The lines from `start` that stand deeper than `depth`, blank ones included."""
    end = start
    while end < len(lines) and (not lines[end].strip() or _depth(lines[end]) > depth):
        end += 1
    return list(lines[start:end]), end


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _fenced(lines: Sequence[str], index: int, fence: re.Match[str]) -> tuple[list[Block], int]:
    close = next(
        (i for i in range(index + 1, len(lines)) if lines[i].strip().startswith(fence[1])),
        len(lines),
    )
    return [_code(lines[index + 1 : close], fence[2])], close + 1


def _code(lines: Sequence[str], language: str) -> Block:
    text = dedent("\n".join(lines)).strip("\n").rstrip()
    return Block(text, "python" if _is_doctest(text) else language)


def _is_doctest(text: str) -> bool:
    return text.startswith(">>> ")


def _directive(name: str, argument: str, body: Sequence[str]) -> list[Block]:
    if name in _CODE:
        options = next((i for i, each in enumerate(body) if not _is_option(each)), len(body))
        return [_code(body[options:], argument.strip().lower())]
    if name == "math":
        formula = dedent("\n".join([argument, *body])).strip()
        return [Block(f"$$\n{formula}\n$$")] if formula else []
    if name not in _SPOKEN:
        return []
    if name in _VERSIONS:
        version, _, words = argument.partition(" ")
        said = blocks("\n".join([words, dedent("\n".join(body))]))
        start = f"{_SPOKEN[name]} {version}"
        end = ": " if said and not said[0].is_code else "."
    else:
        said = blocks("\n".join([argument, dedent("\n".join(body))]))
        start, end = _SPOKEN[name], ": "
    if said and not said[0].is_code:
        return [Block(f"{start}{end}{said[0].text}"), *said[1:]]
    return [Block(f"{start}{end}".rstrip()), *said]


def _is_option(line: str) -> bool:
    return bool(re.match(r"\s*:[\w-]+:", line))


def _paragraph(lines: Sequence[str]) -> Block:
    lines = [line.rstrip() for line in lines]
    if any(_TABLE.match(line.strip()) for line in lines) and len(lines) > 2:
        return _code(lines, "")
    if len(lines) == 2 and _UNDERLINE.match(lines[1].strip()):
        return Block(f"**{inline(lines[0].strip())}**")
    depths = {_depth(line) for line in lines}
    laid_out = len(depths) > 1 or any(_ITEM.match(line.strip()) for line in lines)
    if laid_out:
        return Block(inline("\n".join(_hanging(lines))))
    return Block(inline(" ".join(line.strip() for line in lines)))


def _hanging(lines: Sequence[str]) -> list[str]:
    """Lines of lists with those that go on joined to them."""
    depth = min(_depth(line) for line in lines)
    joined: list[str] = []
    for line in (each[depth:] for each in lines):
        last = joined[-1] if joined else ""
        goes_on = (
            _ITEM.match(last.strip())
            and not _ITEM.match(line.strip())
            and _depth(line) > _depth(last)
        )
        if goes_on:
            joined[-1] = f"{last} {line.strip()}"
        else:
            joined.append(line)
    return joined


# --- within a line --------------------------------------------------------------------------------

# With the first colon missing it is a role all the same, if it is one of those known.
_ROLE = re.compile(
    r"(?::(?:[\w.+-]{1,30}:)?([\w+-]{1,30})|\b(?:obj|class|func|meth)):`([^`\n]{1,300})`"
)
_AUTODOC = re.compile(r"\[`~?([^`\n]{1,200})`\](?![(\[])")  # of Hugging Face's documentation
_LITERAL = re.compile(r"``(.{1,400}?)``(?!`)", re.S)
_LINK = re.compile(r"`([^`<]{1,200}?)\s*<([^`>]{1,300})>`__?")
_REFERENCE = re.compile(r"`([^`]{1,200})`__?(?!\w)")
_FOOTNOTE = re.compile(r" ?\[(?:#?\w{0,20}|\*)\]_(?!\w)")
_TARGET = re.compile(r"^(.{1,200}?)\s*<([^>]{1,200})>$")
_WORDS = {"ref", "doc", "term", "title", "abbr", "sup", "sub", "emphasis", "strong", "numref"}


def inline(text: str) -> str:
    """Roles, literals, links and escapes as plain text and code."""
    if not any(sign in text for sign in "`\\_"):
        return text
    text = _ROLE.sub(_role, text)
    text = _LITERAL.sub(_literal, text)
    text = _LINK.sub(r"\1 (\2)", text)
    text = _REFERENCE.sub(r"\1", text)
    text = _AUTODOC.sub(r"`\1`", _FOOTNOTE.sub("", text))
    return re.sub(r"\\([*_`|])", r"\1", text).replace("\\ ", "")


def _literal(match: re.Match[str]) -> str:
    inner = match[1]
    return f"``{inner}``" if "`" in inner else f"`{inner}`"


def _role(match: re.Match[str]) -> str:
    role, content = (match[1] or "").lower(), match[2].strip()
    if target := _TARGET.match(content):
        content = target[1]
    elif content.startswith("~"):
        content = content[1:].rpartition(".")[2]
    content = content.removeprefix("!")
    if role == "math":
        return f"${content}$"
    return content if role in _WORDS else f"`{content}`"
