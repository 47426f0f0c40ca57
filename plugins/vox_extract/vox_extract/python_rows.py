"""The rows of Python packages: what each thing does, takes, gives back and raises, and an example.

All files of a library are read before rows are made, for a thing's public name may be decided by
the last one; definitions stay in memory, syntax trees do not. A file that cannot be read or parsed
is named and passed over. Answers are the docstring's own words without markup. Of a text that is
too long, whole blocks from its beginning are taken. What has a private name is left out, unless
`private` is set. A question is put in one of several ways, which the name of the thing decides.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vox_extract.definitions import Definition, Kind, definitions, is_private
from vox_extract.docstring import Documented, Item, items_text, read_docstring
from vox_extract.locate import Library, Reader, SourceFile
from vox_extract.markup import Block, blocks, deprecations, join, one_line, plain
from vox_extract.rows import Extracted, Sieve, choose, fitting

FAMILY = "python-docs"

_LEADS_TO_CODE = re.compile(r"(:|\be\.g\.,?|\bexamples?[.:]?)$", re.I)
_HEADING = re.compile(r"(?i)\W{0,4}((code )?examples?( usage)?|usage( example)?s?)\W{0,4}")
_NAME = re.compile(r"\*{0,2}[A-Za-z_][\w.]{0,100}( \(\w{1,10}\))?")
# What `add_newdoc` documents is called, if its docstring begins with a signature.
_CALLED: dict[Kind, Kind] = {"object": "function", "attribute": "method"}
_DECLARED = re.compile(r"(?i)\bdeprecat")


def rows_of(
    definition: Definition, library: Library, file: SourceFile, max_characters: int
) -> Iterator[Extracted]:
    """Every row of one definition.

    Raises:
        RecursionError: the docstring is nested too deeply.
    """
    found = read_docstring(definition.name.rpartition(".")[2], definition.doc)
    if found.signature and definition.kind in _CALLED:
        definition = replace(definition, kind=_CALLED[definition.kind])
    made = _Maker(definition, library, file, max_characters)
    if definition.init_doc:
        _add(found, read_docstring("__init__", definition.init_doc))
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
    """Fill missing sections of a class's docstring from its `__init__`."""
    found.text = found.text or init.text
    found.parameters = found.parameters or init.parameters
    found.raises = found.raises or init.raises
    found.examples = found.examples or init.examples


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the rows of one definition."""

    definition: Definition
    library: Library
    file: SourceFile
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
        text = "\n".join(f"{self.definition.name}{each}" for each in given)
        yield self._row(
            "signature", f"```python\n{text}\n```", same=self.definition.name + text, short=True
        )

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
        """Yield one question about all returned, yielded or raised values."""
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
            yield self._row("deprecated", f"{lead}{answer}", same=self.definition.name + answer)

    def _row(
        self, kind: str, answer: str, *, same: str, part: str = "", short: bool = False
    ) -> Extracted:
        name, line = self.definition.name, self.definition.line
        return Extracted(
            kind,
            FAMILY,
            question(kind, self.definition.kind, name, part),
            answer,
            self.library.provenance(self.file, line, name),
            same,
            short,
        )

    def _fitting(self, several: Sequence[Block], with_code: bool = False) -> str:
        """As many whole blocks as fit, without words at the end that announce code."""
        kept = list(several[: fitting([each.markdown() for each in several], self.max_characters)])
        while len(kept) > 1 and _leads(kept[-1]):
            kept.pop()
        return "" if with_code and not any(each.is_code for each in kept) else join(kept)


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


def python_rows(
    library: Library, sieve: Sieve, reader: Reader, *, private: bool
) -> Iterator[Extracted]:
    """The rows that are kept, in the order of files and lines."""
    for file, definition in definitions(library, reader):
        if is_private(definition.name) and not private:
            sieve.left_out["private"] += bool(definition.doc) and not _is_of_class(definition)
            continue
        try:
            made = list(rows_of(definition, library, file, sieve.max_characters))
        except RecursionError as error:  # directives within directives
            reader.unread.append(f"{file.relative}, line {definition.line}: {error}")
            continue
        yield from sieve.keep(made)


def _is_of_class(definition: Definition) -> bool:
    """Whether its docstring goes into the rows of its class."""
    return definition.name.endswith((".__init__", ".__new__"))


_DESCRIBE = {
    "module": (
        "What is the module `{name}` for?",
        "What does the module `{name}` provide?",
        "Describe the Python module `{name}`.",
    ),
    "class": (
        "What is the class `{name}`?",
        "What is `{name}` for?",
        "Describe the class `{name}`.",
        "What does the class `{name}` do?",
    ),
    "attribute": (
        "What is `{name}`?",
        "What does the attribute `{name}` hold?",
        "Describe the attribute `{name}`.",
    ),
    "object": ("What is `{name}`?", "What does `{name}` do?", "Describe `{name}`."),
}
_DESCRIBE["function"] = _DESCRIBE["method"] = (
    "What does `{name}` do?",
    "What is the {what} `{name}` for?",
    "Explain what `{name}` does.",
    "Describe the {what} `{name}`.",
)
_OTHERS = {
    "signature": (
        "What is the signature of `{name}`?",
        "Which arguments does `{name}` take?",
        "How is `{name}` called?",
        "Show the signature of `{name}`.",
    ),
    "parameter": (
        "What does the parameter `{part}` of `{name}` mean?",
        "What is the argument `{part}` of `{name}`?",
        "In `{name}`, what is `{part}` for?",
        "Explain the parameter `{part}` of `{name}`.",
    ),
    "attribute": (
        "What is the attribute `{part}` of `{name}`?",
        "What does `{part}` of `{name}` hold?",
        "Describe the attribute `{part}` of `{name}`.",
    ),
    "returns": (
        "What does `{name}` return?",
        "What is the return value of `{name}`?",
        "What do I get back from `{name}`?",
    ),
    "yields": ("What does `{name}` yield?", "Over what does `{name}` iterate?"),
    "raises": (
        "Which exceptions does `{name}` raise?",
        "What can `{name}` raise?",
        "When does `{name}` raise an exception?",
    ),
    "example": (
        "Show an example of `{name}`.",
        "How do I use `{name}`?",
        "Give me an example of using `{name}`.",
        "Can you show how `{name}` is used?",
    ),
    "deprecated": (
        "Is `{name}` deprecated?",
        "Should I still use `{name}`?",
        "Has `{name}` been deprecated?",
    ),
}


def question(kind: str, what: str, name: str, part: str = "") -> str:
    """A question.

    Args:
        kind: describe, or a key of the table above.
        what: kind of thing that `name` is.
        part: of `name`, that the question is about.
    """
    templates = _DESCRIBE[what] if kind == "describe" else _OTHERS[kind]
    return choose(templates, kind, name, part).format(name=name, part=part, what=what)
