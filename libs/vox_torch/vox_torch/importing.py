"""transformers and PEFT imported in half their time: without what they import for others.

Models of transformers import torch's compiler (dynamo) to mark some functions for it, and torch's
layers for models over several processes: 1,200 modules. vox compiles nothing and computes in one
process.

While they are imported and a model is built and trained, a stand-in is in the compiler's place,
which marks nothing, and gives way to the compiler as soon as it is asked for more. While they are
imported, torch says of itself that it is built for one process, as some builds are; they ask once,
and believe it for as long as the process lasts. Nothing is done where the compiler, or several
processes, are in use already, or where transformers may have asked before.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from vox_torch.libraries import absent

_COMPILER = "torch._dynamo"
_ASKED_FOR_A_CLASS = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MARKERS = frozenset({"disable", "assume_constant_result", "allow_in_graph", "graph_break"})
_CACHE = "__dynamo_disable"
"""Where a function of torch's own keeps what `disable` made of it."""

_SHARED = (
    "transformers.modeling_layers", "transformers.masking_utils", "transformers.generation.utils",
    "transformers.models.auto.modeling_auto", "peft",
)  # fmt: skip
"""What all causal language models import."""
_UNUSED = ("scipy", "sklearn")
"""What losses and metrics of other models import, wherever it is installed."""


def import_models() -> None:
    """Import what all models of transformers need, and PEFT.

    Raises:
        ImportError: one of them, or torch, is not there.
    """
    with without_compiler(), ExitStack() as stack:
        stack.enter_context(absent("bitsandbytes"))
        if "transformers" not in sys.modules and not _in_several_processes():
            stack.enter_context(patch("torch.distributed.is_available", return_value=False))
            for name in _UNUSED:
                stack.enter_context(absent(name))
        for name in _SHARED:
            importlib.import_module(name)


def _in_several_processes() -> bool:
    import torch.distributed as distributed

    started = distributed.is_available() and distributed.is_initialized()
    return started or "WORLD_SIZE" in os.environ


@contextmanager
def without_compiler() -> Iterator[None]:
    """Who marks functions for torch's compiler finds a stand-in for it, of which nothing is left
    afterwards but functions without a mark."""
    import torch  # noqa: F401  # the compiler belongs to it

    if _COMPILER in sys.modules:
        yield
        return
    compiler = _Compiler()
    sys.modules |= compiler.modules
    try:
        yield
    finally:
        compiler.give_way()


class _Compiler(ModuleType):
    """What marks functions, and leaves them as they are."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self._marked: list[object] = []
        self.modules = {_COMPILER: self, _ASKED_FOR_A_CLASS: _Later(_ASKED_FOR_A_CLASS, self)}

    def __getattr__(self, name: str) -> Any:
        if name in _MARKERS:
            return self._mark
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.give_way()  # who imports a module within asks for `__path__`
        return getattr(importlib.import_module(_COMPILER), name)

    def _mark(self, function: object = None, *_: object, **__: object) -> object:
        """A decorator, with or without arguments of its own."""
        if not callable(function):
            return self._mark
        self._marked.append(function)
        return function

    def give_way(self) -> None:
        """Leave the place to the real module, with nothing kept."""
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        for function in self._marked:
            if getattr(function, _CACHE, None) is function:
                delattr(function, _CACHE)
        self._marked.clear()


class _Later(ModuleType):
    """Whose functions and classes are those of the real module, once they are called."""

    def __init__(self, name: str, compiler: _Compiler) -> None:
        super().__init__(name)
        self._compiler = compiler

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **more: object) -> object:
            self._compiler.give_way()
            return getattr(importlib.import_module(self.__name__), name)(*args, **more)

        return call
