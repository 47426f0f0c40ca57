"""Measure the sizes that budgets.toml holds down, and print them.

    python tools/budgets.py            every measure beside its ceiling
    python tools/budgets.py --lower    write today's values into budgets.toml where they are lower

Sources are parsed and never imported. Tests do not count.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "budgets.toml"

# STYLE: words that hide who does what. A docstring's first paragraph has none of them.
_VAGUE = re.compile(
    r"^(what|those|whatever|where|how)\b|"
    r"\b(told|tells|asked|looked at|made of|taken for|so much as|what is|whatever)\b",
    re.I,
)
_INSIDES = re.compile(
    r"sys\.modules\[[^\]]+\]\s*=[^=]|sys\.meta_path|__globals__|FunctionType\(|"
    r"__dict__\[[^\]]+\]\s*=[^=]|__code__"
)
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def packages() -> dict[str, Path]:
    """Import name -> folder of every package in this repository."""
    inits = [*ROOT.glob("libs/*/*/__init__.py"), *ROOT.glob("plugins/*/*/__init__.py")]
    folders = [ROOT / "vox_core", *(file.parent for file in inits)]
    return {each.name: each for each in sorted(folders) if each.name != "tests"}


@cache
def sources(package: str) -> Mapping[str, Path]:
    """Module name -> file."""
    folder = packages()[package]
    return {
        ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): file
        for file in sorted(folder.rglob("*.py"))
    }


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), file)


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(file)))


# --- lines ----------------------------------------------------------------------------------------


def code_lines(package: str) -> int:
    """Lines with code; blank lines, comments and docstrings do not count."""
    return sum(map(lines_of_code, sources(package).values()))


def lines_of_code(file: Path) -> int:
    text = file.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in _docstrings(file):
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def _docstrings(file: Path) -> Iterator[ast.Expr]:
    """Strings that stand alone: docstrings, and those below a constant."""
    for node in nodes(file):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node


def non_blank_lines(package: str) -> int:
    texts = (file.read_text(encoding="utf-8") for file in sources(package).values())
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


# --- imports --------------------------------------------------------------------------------------


@cache
def imported(module: str) -> frozenset[str]:
    """Modules of the same package that `module` imports, in functions too; not those for types."""
    package = module.partition(".")[0]
    found = {
        _module(package, target)
        for node in _without_types(parsed(sources(package)[module]))
        for target in _targets(node)
        if target.partition(".")[0] == package
    }
    return frozenset(found - {module, ""})


def _module(package: str, target: str) -> str:
    known = sources(package)
    if target in known:
        return target
    parent = target.rpartition(".")[0]
    return parent if parent in known else ""


def _without_types(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _without_types(node)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def closure(module: str) -> set[str]:
    """Modules that running all of `module` may import, itself included."""
    seen, left = {module}, [module]
    while left:
        more = imported(left.pop()) - seen
        seen |= more
        left.extend(more)
    return seen


def _imports_in_functions() -> int:
    return sum(
        _targets(inner) != [] and _targets(inner)[0].partition(".")[0] == package
        for package in packages()
        for file in sources(package).values()
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    )


# --- names and words ------------------------------------------------------------------------------


def _repeated(names: Iterator[str]) -> int:
    return sum(count > 1 for count in Counter(names).values())


def _public_classes(package: str) -> Iterator[str]:
    for file in sources(package).values():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name


def _stems(package: str) -> Iterator[str]:
    return (file.stem for file in sources(package).values() if file.stem[0] != "_")


def _vague_summaries(package: str) -> int:
    defined = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return sum(
        bool(_VAGUE.search((ast.get_docstring(node) or "").partition("\n\n")[0]))
        for file in sources(package).values()
        for node in nodes(file)
        if isinstance(node, defined)
    )


def _insides(package: str) -> int:
    """Files that change what belongs to another library."""
    return sum(bool(_INSIDES.search(f.read_text("utf-8"))) for f in sources(package).values())


def measure() -> dict[str, dict[str, int]]:
    """Measure every size in budgets.toml."""
    names = packages()
    core = sources("vox_core")
    return {
        "code-lines": {name: code_lines(name) for name in names},
        "ceilings": {
            "vox-core-non-blank-lines": non_blank_lines("vox_core"),
            "all-non-blank-lines": sum(map(non_blank_lines, names)),
            "train-closure": len(closure("vox_core.cli.train")),
            "fan-out": max(len(imported(module)) for module in core),
            "repeated-class-names": sum(_repeated(_public_classes(name)) for name in names),
            "repeated-module-stems": sum(_repeated(_stems(name)) for name in names),
            "imports-in-functions": _imports_in_functions(),
            "files-with-a-hand-in-other-libraries": sum(map(_insides, names)),
            "vague-summaries": sum(map(_vague_summaries, names)),
        },
    }


def lowered(text: str, found: Mapping[str, Mapping[str, int]]) -> str:
    """budgets.toml with each value that is lower now."""
    ceilings = tomllib.loads(text)
    for table, values in found.items():
        for key, value in values.items():
            if value < ceilings[table][key]:
                text = re.sub(rf"^{key} = [\d_]+", f"{key} = {value:_}", text, flags=re.M)
    return text


def main() -> None:
    found, text = measure(), BUDGETS.read_text()
    if "--lower" in sys.argv:
        BUDGETS.write_text(lowered(text, found))
    ceilings = tomllib.loads(BUDGETS.read_text())
    for table, values in found.items():
        for key, value in values.items():
            print(f"{key:40} {value:8,} of {ceilings[table].get(key, 0):,}")


if __name__ == "__main__":
    main()
