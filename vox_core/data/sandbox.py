"""Jinja's sandbox with a budget: a chat template that takes too much is stopped, wherever it is.

The stock sandbox bounds what a template may reach, not what it may use: `{{ 'a' * 10**10 }}` is
allowed. Here everything that makes something is charged to the budget of the rendering, where it
can be in advance: operators, calls, filters, literals, concatenation, and each turn of a loop or a
macro. What is counted is the same on every machine; a clock stands behind it for what no count
foresees. Values made by a template are bounded together, so those it keeps are, too.

Operators and calls are what the sandbox intercepts. For the rest the parsed template is rewritten
before it is compiled (`_Metered`), with filters whose names no template can write but as text for
`map`, where they are metered like any other.

Not here: which globals and filters chat templates have (`template.py` takes transformers').
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import reduce, wraps
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from vox_core.data.sizes import (
    BUDGET,
    TooMuch,
    extent,
    extent_of_written,
    require_small,
    size_of_binop,
    size_of_filter,
    size_of_method,
)

if TYPE_CHECKING:
    from jinja2.runtime import Context

PER_CHARACTER = 64
"""What each character of the conversation adds to that."""
SECONDS = 10.0
STEP = 64

# A row's tools may have numbers of any size; widths in a format are looked for in its text.
_ANY_INT = frozenset({"default", "d", "int", "float", "string", "format"})

_OF_A_LOOP = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})

_FORMATS = frozenset({"format", "format_map"})

F = TypeVar("F", bound=Callable[..., Any])


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template; renderings are one at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=self._finalized)
        self.refill(0)
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals.pop("lipsum", None)

    def refill(self, characters: int) -> None:
        """Begin a rendering of so many characters with a full budget."""
        self._left = BUDGET + PER_CHARACTER * characters
        self._until = time.monotonic() + SECONDS
        self._charges = 0

    def adopt(self, filters: Iterable[tuple[str, Callable[..., Any]]]) -> None:
        """Take these filters, and meter all that there are."""
        own = {**self.filters, **dict(filters)}
        self.filters = {name: self._metered(name, filter) for name, filter in own.items()}
        self.filters |= {
            "%tick": self._tick,
            "%made": pass_context(lambda _context, value: self.made(value)),
            "%joined": pass_context(lambda _context, parts: self._concat(map(self._text, parts))),
            "%sum": self._sum,
        }

    def parse_metered(self, source: str) -> nodes.Template:
        """The template, rewritten so that it is charged for all it does."""
        template = _Metered().visit(self.parse(source))
        assert isinstance(template, nodes.Template)
        return template.set_environment(self)  # type: ignore[return-value]

    # --- what the sandbox intercepts

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in _OF_A_LOOP:  # numbers and truth values
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    @pass_context
    def _sum(self, context: Context, parts: list[Any]) -> Any:
        """`a + b + c`, charged and joined at once where all of it is text."""
        if type(parts) is not list:
            raise SecurityError("no operands")  # `map` takes the name of any filter
        if set(map(type, parts)) == {str}:
            self._charge(sum(map(len, parts)) + STEP * len(parts))
            return "".join(parts)
        return reduce(lambda left, right: self.call_binop(context, "+", left, right), parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            self._charge(len(left) + len(right))
            return left + right
        self._charge(size_of_binop(operator, left, right))
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            size = size_of_method(owner, method.__name__, args, kwargs)
        else:
            size = args[-1] if __obj is __self.globals.get("range") and args else 0
            size = size if isinstance(size, int) else 0
        if not _takes_any_int(__obj, method):
            require_small(args, kwargs)
        __self._charge(max(size, 0))
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    # --- the budget

    def _charge(self, size: int) -> None:
        self._left -= size + STEP
        self._charges += 1
        if self._left < 0:
            raise TooMuch("the template makes more text than a rendering may, or takes more steps")
        if not self._charges & 0xFF and time.monotonic() > self._until:
            raise TooMuch(f"the template takes more than {SECONDS:.0f} seconds")

    @pass_context
    def _tick(self, _context: Context, value: Any) -> Any:
        self._charge(0)
        return value

    def made(self, value: Any) -> Any:
        """Charge for a value that the template made."""
        kind = type(value)
        if kind is str:
            self._charge(len(value))
        elif kind not in (int, bool, float, type(None)):
            self._charge(extent(value, self._left))
        return value

    def _text(self, value: Any) -> str:
        return value if type(value) is str else str(self._finalized(value))

    def _finalized(self, value: Any) -> Any:
        """A value about to be written; text is charged where it is joined."""
        if type(value) is not str:
            self._charge(8 * extent_of_written(value, self._left))
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        kept: list[str] = []
        for part in parts:
            self._charge(len(part))
            kept.append(part)
        return "".join(kept)

    def _metered(self, name: str, filter: F) -> F:
        passes_something = hasattr(filter, "jinja_pass_arg")

        @wraps(filter)
        def metered(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if passes_something else args
            if given:
                if name not in _ANY_INT:
                    require_small(given[1:], kwargs)
                self._charge(size_of_filter(name, given[0], given[1:], kwargs, self._left))
                if isinstance(given[0], GeneratorType):
                    rest = (map(self.made, given[0]), *given[1:])
                    args = (*args[: len(args) - len(given)], *rest)
            return self.made(filter(*args, **kwargs))

        return metered  # type: ignore[return-value]


def _takes_any_int(called: Any, method: Any) -> bool:
    """Macros are the template's own and metered inside; namespaces keep what they are given."""
    keeps = isinstance(called, type) and issubclass(called, Namespace)
    return keeps or isinstance(called, Macro) or getattr(method, "__name__", "") in _FORMATS


class _Metered(NodeTransformer):
    """Charges for what the sandbox does not intercept."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node))
        if node.test is not None:
            node.test = nodes.And(_through("%tick", nodes.Const(True)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("%joined", nodes.List(node.nodes))

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        parts: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        visited = [self.visit(part) for part in (left, *reversed(parts))]
        return _through("%sum", nodes.List(visited, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("%made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through("%made", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through("%made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through("%made", node) if node.ctx == "load" else node


def _tick_statement(node: nodes.Node) -> nodes.Stmt:
    return nodes.ExprStmt(_through("%tick", nodes.Const(None)), lineno=node.lineno)


def _through(filter: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, filter, [], [], None, None, lineno=value.lineno)
