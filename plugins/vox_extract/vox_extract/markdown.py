"""The rows of Markdown files: what a section says, and the code that a paragraph announces.

Files are parsed by markdown-it. A section is what stands between its heading and the next one; its
question is made of the headings above it, its answer is the section's own Markdown without HTML,
images, and links that lead to other files of the same folder (their text stays). Front matter is
skipped, and so is what stands before the first heading where that is badges alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from vox_extract.locate import Library, Reader, SourceFile, of_path
from vox_extract.markup import fenced
from vox_extract.rows import Extracted, Sieve, choose, fitting

FAMILY = "markdown-docs"

_FRONT = re.compile(r"\A(---|\+\+\+)[ \t]*\n.*?^\1[ \t]*$", re.S | re.M)
_ANNOUNCES = re.compile(r"[:.…]+$")

_SECTION = (
    "What does “{title}” say about {topic}?",
    "Explain {topic} ({title}).",
    "What should I know about {topic} in {title}?",
)
_TOP = ("Tell me about {title}.", "What is “{title}” about?", "Give an overview of {title}.")
_CODE = (
    "Show code for this ({title}): {text}",
    "Show the code ({title}): {text}",
    "What does the code look like ({title})? {text}",
)
_CODE_OF = ("Show code for {topic} ({title}).", "Give the code for {topic} ({title}).")
_CODE_OF_TOP = ("Show code for “{title}”.", "Give the code for “{title}”.")


@dataclass
class _Section:
    """A heading with what stands below it.

    Args:
        path: its heading, and those above it, the topmost first.
        line: of the heading, from 1.
        parts: what it is made of: source lines; for code, the language as well.
    """

    path: tuple[str, ...]
    line: int
    parts: list[_Part] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    line: int
    code: bool = False
    paragraph: bool = False


def locate(folder: str) -> Library:
    """Find the Markdown files below a folder, or one file.

    Raises:
        DataError: D060, there is none.
    """
    return of_path(Path(folder), (".md", ".markdown"))


def markdown_rows(library: Library, sieve: Sieve, reader: Reader) -> Iterator[Extracted]:
    """The rows that are kept, in the order of files and lines."""
    parser = MarkdownIt("commonmark").enable("table")
    for file in library.files:
        if (text := reader.read(file, _text)) is not None:
            for section in _sections(parser, text, file.path.stem):
                yield from sieve.keep(_rows(section, library, file, sieve.max_characters))


def _text(source: bytes) -> str:
    """Front matter becomes blank lines, so that all lines keep their numbers."""
    try:
        text = source.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from None
    return _FRONT.sub(lambda match: "\n" * match[0].count("\n"), text, count=1)


# --- sections -------------------------------------------------------------------------------------


def _sections(parser: Any, text: str, name: str) -> Iterator[_Section]:
    """Each section of a document; before the first heading it is called like the file."""
    lines = text.split("\n")
    section = _Section((name,), 1)
    headings: list[tuple[int, str]] = []
    for token, inline in _blocks(parser.parse(text)):
        if token.type == "heading_open":
            yield section
            level = int(token.tag[1:])
            headings = [each for each in headings if each[0] < level]
            headings.append((level, _words(inline)))
            section = _Section(tuple(each for _, each in headings), token.map[0] + 1)
        elif part := _part(token, lines):
            section.parts.append(part)
    yield section


def _blocks(tokens: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The document's own blocks, each with its inline token, if it has one."""
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting >= 0:
            inline = tokens[index + 1] if token.nesting == 1 else None
            yield token, inline if inline is not None and inline.type == "inline" else None


def _part(token: Any, lines: Sequence[str]) -> _Part | None:
    first, end = token.map or (0, 0)
    if token.type == "html_block" or first == end:
        return None
    if token.type in ("fence", "code_block"):
        language = token.info.split()[0] if token.info.split() else ""
        return _Part(fenced(token.content, language), first + 1, code=True)
    text = _cleaned("\n".join(lines[first:end]).rstrip())
    if not text or token.type == "hr":
        return None
    return _Part(text, first + 1, paragraph=token.type == "paragraph_open")


def _words(inline: Any) -> str:
    """An inline token as text, its code in backticks."""
    if inline is None:
        return ""
    said = [
        f"`{each.content}`" if each.type == "code_inline" else each.content
        for each in inline.children or ()
        if each.type in ("text", "code_inline", "text_special")
    ]
    return " ".join("".join(said).split())


_IMAGE = re.compile(r"!\[[^\]\n]{0,300}\](?:\([^)\n]{0,500}\)|\[[^\]\n]{0,100}\])")
_EMPTY_LINK = re.compile(r"\[\s*\]\([^)\n]{0,500}\)")
_LINK = re.compile(r"\[([^\]\[\n]{1,300})\]\((?!https?://)[^)\s]{0,300}(?: \"[^\"\n]{0,200}\")?\)")
_BY_REFERENCE = re.compile(r"\[([^\]\[\n]{1,300})\]\[[^\]\n]{0,100}\]")
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_TAG = re.compile(r"</?[a-zA-Z][^<>\n]{0,300}>")


def _cleaned(text: str) -> str:
    """Without images, HTML, and links whose target is not there; code is left alone."""
    pieces = re.split(r"(```.*?```|`[^`\n]+`)", text, flags=re.S)
    for index in range(0, len(pieces), 2):
        piece = _COMMENT.sub("", _IMAGE.sub("", pieces[index]))
        piece = _BY_REFERENCE.sub(r"\1", _EMPTY_LINK.sub("", piece))
        pieces[index] = _TAG.sub("", piece)
    # The text of a link may be code.
    return _LINK.sub(r"\1", "".join(pieces)).strip()


# --- rows -----------------------------------------------------------------------------------------


def _rows(
    section: _Section, library: Library, file: SourceFile, max_characters: int
) -> Iterator[Extracted]:
    def row(kind: str, question: str, answer: str, line: int) -> Extracted:
        where = library.provenance(file, line, " > ".join(section.path))
        return Extracted(kind, FAMILY, question, answer, where, answer, short=kind == "code")

    title, *below = section.path
    topic = f"“{' > '.join(below)}”"
    texts = [part.text for part in section.parts]
    if any(not each.code for each in section.parts):
        answer = "\n\n".join(texts[: fitting(texts, max_characters)])
        yield row("section", _question(title, below, topic), answer, section.line)
    for index, part in enumerate(section.parts):
        if not part.code:
            continue
        before = section.parts[index - 1] if index else None
        if before and before.paragraph:
            text = _ANNOUNCES.sub("", " ".join(before.text.split()))
            context = " > ".join(section.path)
            question = choose(_CODE, *section.path, text).format(title=context, text=text)
        else:
            templates = _CODE_OF if below else _CODE_OF_TOP
            key = (*section.path, str(index))
            question = choose(templates, *key).format(title=title, topic=topic)
        yield row("code", question, part.text, part.line)


def _question(title: str, below: Sequence[str], topic: str) -> str:
    if not below:
        return choose(_TOP, title).format(title=title)
    if below[-1].endswith("?"):  # a heading that is a question already
        return f"{below[-1]} ({title})"
    return choose(_SECTION, title, *below).format(title=title, topic=topic)
