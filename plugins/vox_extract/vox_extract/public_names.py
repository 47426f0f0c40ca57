"""Under which name a thing is known: `numpy.median`, not `numpy.lib._function_base_impl.median`.

Names go from module to module by `from … import …`; each such step is an edge, and a definition is
known by every name that can be reached from it. Of those the one is taken that a user would write:
its own, unless that is private, or a package above its module hands it on; then the shortest, and
of several the one whose module is called like the one that it is from.

Private is a name with a part that begins with an underscore. Not followed: `import a.b as c`,
lazy loaders, `__getattr__`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from vox_extract.definitions import Import, Module

Name: TypeAlias = tuple[str, str]
"""Module, and a name at its top level."""

MAX_NAMES = 1000
"""Of one thing."""


@dataclass(frozen=True, slots=True)
class _Edge:
    """A name that another module gives to a thing; `offered`: it is meant to be used there."""

    name: Name
    offered: bool


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") for part in dotted.split("."))


class PublicNames:
    """The names of a package's things.

    Args:
        modules: name -> module, all of one package or library.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = modules
        self._exports: dict[str, tuple[frozenset[str], bool]] = {}
        self._edges: defaultdict[Name, list[_Edge]] = defaultdict(list)
        for name in sorted(modules):
            for each in modules[name].imports:
                self._add(modules[name], each)

    def of(self, module: str, name: str) -> str:
        """The dotted name for `name` (`Class.method`) of `module`; it may be private."""
        if not name:
            return module
        top, dot, rest = name.partition(".")
        return f"{self._best(module, top)}{dot}{rest}"

    def _best(self, module: str, name: str) -> str:
        own = f"{module}.{name}"
        others = [
            f"{where}.{alias}"
            for where, alias in self._reached((module, name))
            if not is_private(f"{where}.{alias}")
            and (is_private(own) or module.startswith(f"{where}."))
        ]
        public = [own] if not is_private(own) else []
        stem = module.rpartition(".")[2].strip("_").removesuffix("_impl")
        return min(
            [*others, *public],
            key=lambda each: (each.count("."), stem not in each.split(".")[:-1], each),
            default=own,
        )

    def _reached(self, start: Name) -> Iterator[Name]:
        """Where it is offered under another name."""
        seen, waiting = {start}, [start]
        while waiting and len(seen) < MAX_NAMES:
            for edge in self._edges.get(waiting.pop(), ()):
                if edge.name not in seen:
                    seen.add(edge.name)
                    waiting.append(edge.name)
                    if edge.offered:
                        yield edge.name

    def _add(self, into: Module, each: Import) -> None:
        if each.module not in self._modules or each.module == into.name:
            return
        if each.name == "*":
            for name in sorted(self._all(each.module, frozenset())[0]):
                self._edges[each.module, name].append(_Edge((into.name, name), True))
            return
        edge = _Edge((into.name, each.bound), self._offers(into, each.bound))
        self._edges[each.module, each.name].append(edge)

    def _offers(self, module: Module, name: str) -> bool:
        names, whole = self._all(module.name, frozenset())
        if module.exports is not None and (whole or name in names):
            return name in names
        return module.is_package

    def _all(self, name: str, asked: frozenset[str]) -> tuple[frozenset[str], bool]:
        """What a star import of the module gives, and whether that is all."""
        if name in self._exports:
            return self._exports[name]
        if name in asked or name not in self._modules:
            return frozenset(), False
        found = self._computed(self._modules[name], asked | {name})
        if not asked:  # in a circle, what was found on the way is not all
            self._exports[name] = found
        return found

    def _computed(self, module: Module, asked: frozenset[str]) -> tuple[frozenset[str], bool]:
        names, whole = set(module.exports or ()), module.whole
        if module.exports is None:
            names = {each for each in module.bound if not each.startswith("_") and each != "*"}
            stars = [each.module for each in module.imports if each.name == "*"]
        else:
            stars = [self._meant(module, each) for each in module.exports_of]
        for star in stars:
            more, all_of_it = self._all(star, asked)
            names |= more
            whole = whole and all_of_it
        return frozenset(names), whole

    def _meant(self, module: Module, name: str) -> str:
        """The module that `name` stands for in `name.__all__`."""
        for each in module.imports:
            if each.bound == name:
                return f"{each.module}.{each.name}"
        return f"{module.name}.{name}" if module.is_package else name
