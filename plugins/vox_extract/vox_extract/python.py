"""The rows of Python definitions: what each does, takes, gives back and raises, and an example.

Answers are the docstring's own words without its markup. Of a text that is too long, whole blocks
from its beginning are taken. What has a private name is left out, unless asked for.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vox_extract.docstring import Docstrings, Documented, Item, items_text
from vox_extract.plain import Block, blocks, deprecations, join, one_line, plain
from vox_extract.questions import question
from vox_extract.rows import Extracted
from vox_extract.source import Definition, Kind

FAMILY = "python-docs"

_LEADS_TO_CODE = re.compile(r"(:|\be\.g\.,?|\bexamples?[.:]?)$", re.I)
_HEADING = re.compile(r"(?i)\W{0,4}((code )?examples?( usage)?|usage( example)?s?)\W{0,4}")
_NAME = re.compile(r"\*{0,2}[A-Za-z_][\w.]{0,100}( \(\w{1,10}\))?")
# What `add_newdoc` documents is called, if its docstring begins with a signature.
_CALLED: dict[Kind, Kind] = {"object": "function", "attribute": "method"}
_DECLARED = re.compile(r"(?i)\bdeprecat")


@dataclass(frozen=True, slots=True)
class Source:
    """Where definitions are from: the part of the provenance that they share."""

    package: str
    version: str
    file: str
    licence: str


def rows_of(
    definition: Definition,
    name: str,
    source: Source,
    docstrings: Docstrings,
    *,
    max_characters: int,
) -> Iterator[Extracted]:
    """Every row of one definition, whose public name is `name`.

    Raises:
        RecursionError: the docstring is nested too deeply.
    """
    found = docstrings.read(name.rpartition(".")[2], definition.doc)
    if found.signature and definition.kind in _CALLED:
        definition = replace(definition, kind=_CALLED[definition.kind])
    made = _Maker(definition, name, source, max_characters)
    if definition.init_doc:
        _add(found, docstrings.read("__init__", definition.init_doc))
    yield from made.describe(found)
    yield from made.signature(found)
    yield from made.parts("parameter", found.parameters)
    yield from made.parts("attribute", found.attributes)
    yield from made.listed("returns", found.returns)
    yield from made.listed("yields", found.yields)
    yield from made.listed("raises", found.raises)
    yield from made.example(found)
    yield from made.deprecated(found)


def _add(found: Documented, init: Documented) -> None:
    """What `__init__` says of its class, where the class itself says nothing."""
    found.text = found.text or init.text
    found.parameters = found.parameters or init.parameters
    found.raises = found.raises or init.raises
    found.examples = found.examples or init.examples


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the rows of one definition."""

    definition: Definition
    name: str
    source: Source
    max_characters: int

    def describe(self, found: Documented) -> Iterator[Extracted]:
        said = _without_examples(blocks(found.text))
        if answer := self._fitting(list(said)):
            yield self._row("describe", answer, same=answer)

    def signature(self, found: Documented) -> Iterator[Extracted]:
        given = self.definition.signatures or tuple(filter(None, [found.signature]))
        documented = self.definition.doc or self.definition.init_doc or self.definition.stub
        if not documented or not given or not any(_has_parameters(each) for each in given):
            return
        text = "\n".join(f"{self.name}{each}" for each in given)
        yield self._row("signature", f"```python\n{text}\n```", same=self.name + text, short=True)

    def parts(self, kind: str, items: Sequence[Item]) -> Iterator[Extracted]:
        """A question for each parameter, or each attribute."""
        for item in items:
            said, name = self._fitting(blocks(item.text)), item.name.strip("`")
            if not said or not _NAME.fullmatch(name):
                continue
            head = f"`{name}` ({one_line(item.type)})" if item.type else f"`{name}`"
            answer = f"{head}: {said}"
            if len(said) >= _WORTH_SAYING:
                yield self._row(kind, answer, part=name, same=answer)

    def listed(self, kind: str, items: Sequence[Item]) -> Iterator[Extracted]:
        """One question for all that is returned, yielded or raised."""
        if not any(item.text.strip() for item in items):
            return
        items = [_exception(item) for item in items] if kind == "raises" else items
        answer = items_text(items, plain)
        yield self._row(kind, answer, same=answer)

    def example(self, found: Documented) -> Iterator[Extracted]:
        shown = blocks(found.examples)
        if not any(each.is_code for each in shown):
            shown = _examples_among(blocks(found.text))
        if not any(each.is_code for each in shown):
            return
        shown = [_as_python(each) for each in shown]
        if answer := self._fitting(shown, with_code=True):
            yield self._row("example", answer, same=answer, short=True)

    def deprecated(self, found: Documented) -> Iterator[Extracted]:
        said = self.definition.deprecated or found.deprecated
        answer = plain(said) if said else deprecations(found.text)
        if answer:
            lead = "" if _DECLARED.search(answer) else "Deprecated: "
            yield self._row("deprecated", f"{lead}{answer}", same=self.name + answer)

    def _row(
        self, kind: str, answer: str, *, same: str, part: str = "", short: bool = False
    ) -> Extracted:
        return Extracted(
            kind,
            FAMILY,
            question(kind, self.definition.kind, self.name, part),
            answer,
            {
                "package": self.source.package,
                "version": self.source.version,
                "file": self.source.file,
                "line": self.definition.line,
                "object": self.name,
                "licence": self.source.licence,
            },
            same,
            short,
        )

    def _fitting(self, several: Sequence[Block], with_code: bool = False) -> str:
        """As many whole blocks as fit; the first one in any case, for the sieve to judge."""
        fitting: list[Block] = []
        for block in several:
            longer = join([*fitting, block])
            if fitting and len(longer) > self.max_characters:
                break
            fitting.append(block)
        while fitting and not fitting[-1].is_code and _leads(fitting[-1]) and len(fitting) > 1:
            fitting.pop()
        if with_code and not any(each.is_code for each in fitting):
            return ""
        return join(fitting)


_WORTH_SAYING = 15
"""Characters of what is said of a parameter, without its name and type."""


def _has_parameters(signature: str) -> bool:
    return not signature.replace(" ", "").startswith("()")


def _exception(item: Item) -> Item:
    """griffe gives an exception's name as its type."""
    return Item(item.type, "", item.text) if item.type and not item.name else item


def _leads(block: Block) -> bool:
    if block.is_code:
        return False
    return bool(_LEADS_TO_CODE.search(block.text) or _HEADING.fullmatch(block.text))


def _as_python(block: Block) -> Block:
    """Code of no language is Python's in an example, if Python can read it."""
    if block.language != "":
        return block
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(block.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return block
    return replace(block, language="python")


def _is_example(several: Sequence[Block], index: int) -> bool:
    """A session of the interpreter, or code below a line that says "Example"."""
    if not 0 <= index < len(several) or not several[index].is_code:
        return False
    if several[index].text.startswith(">>> "):
        return True
    before = several[index - 1] if index else None
    return bool(before and not before.is_code and _HEADING.fullmatch(before.text))


def _without_examples(several: Sequence[Block]) -> Iterator[Block]:
    """Without examples and the lines that announce them."""
    for index, block in enumerate(several):
        announces = _is_example(several, index + 1) and _leads(block)
        if not announces and not _is_example(several, index):
            yield block


def _examples_among(several: Sequence[Block]) -> list[Block]:
    """Examples, each with the paragraph that announces it, unless that is a mere heading."""
    shown: list[Block] = []
    for index, block in enumerate(several):
        if _is_example(several, index):
            before = several[index - 1] if index else block
            if _leads(before) and not _HEADING.fullmatch(before.text):
                shown.append(before)
            shown.append(block)
    return shown
