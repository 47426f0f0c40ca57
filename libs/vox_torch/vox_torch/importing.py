"""transformers and PEFT imported in half their time: without what they import for others.

Models of transformers import torch's compiler (dynamo) to mark some functions for it, and torch's
layers for models over several processes: 800 modules. vox compiles nothing and computes in one
process. They import scipy's optimisers for one function of the losses of object detection, and read
the sources of all models of transformers twice, to know what each defines: once is enough.

While they are imported and a model is built and trained, a stand-in is in the compiler's place,
which marks nothing, and gives way to the compiler as soon as it is asked for more. While they are
imported, torch says of itself that it is built for one process, as some builds are; they ask once,
and believe it for as long as the process lasts (ADR 0012). Nothing is done where the compiler, or
several processes, are in use already, or where transformers may have asked before. The function of
scipy imports scipy when it is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

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
_LOSSES, _FOR_OTHERS = "transformers.loss.loss_utils", "scipy.optimize"
_SCAN = "create_import_structure_from_path"
_ALONE = threading.RLock()


def import_models() -> None:
    """Import what all models of transformers need, and PEFT.

    Raises:
        ImportError: one of them, or torch, is not there.
    """
    with _ALONE, without_compiler(), absent("bitsandbytes"), ExitStack() as on:
        if "transformers" not in sys.modules and not _in_several_processes():
            distributed = importlib.import_module("torch.distributed")
            on.enter_context(_replaced(distributed, "is_available", lambda: False))
        on.enter_context(_scanned_once(importlib.import_module("transformers.utils.import_utils")))
        # Nothing else gets the stand-in: scikit-learn, which transformers imports too, needs more.
        with _later(_FOR_OTHERS), suppress(ModuleNotFoundError):
            importlib.import_module(_LOSSES)
        for name in _SHARED:
            importlib.import_module(name)


def _in_several_processes() -> bool:
    import torch.distributed as distributed

    started = distributed.is_available() and distributed.is_initialized()
    return started or "WORLD_SIZE" in os.environ


@contextmanager
def _replaced(owner: ModuleType, name: str, value: object) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


@contextmanager
def _scanned_once(utils: ModuleType) -> Iterator[None]:
    """The packages `transformers` and `transformers.models` scan the same folder, and name it by
    its path and by that of a file in it: what the first has found is not looked for again."""
    own = getattr(utils, _SCAN, None)
    if own is None:
        yield
        return

    def scan(path: str | Path) -> object:
        return own(Path(path).parent if Path(path).is_file() else path)

    with _replaced(utils, _SCAN, scan):
        yield


@contextmanager
def _later(name: str) -> Iterator[None]:
    """A module's functions may be imported, and the module is when one is called."""
    if name in sys.modules or importlib.util.find_spec(name.partition(".")[0]) is None:
        yield
        return

    def give_way() -> None:
        if within in sys.meta_path:
            sys.meta_path.remove(within)
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]

    within, stand_in = _Within(name, give_way), _Later(name, give_way)
    sys.meta_path.insert(0, within)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        give_way()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Who marks functions for torch's compiler finds a stand-in for it, of which nothing is left
    afterwards but functions without a mark."""
    import torch  # noqa: F401  # the compiler belongs to it

    if _COMPILER in sys.modules:
        yield
        return
    compiler = _Compiler()
    compiler.take_place()
    try:
        yield
    finally:
        compiler.give_way()


class _Compiler(ModuleType):
    """What marks functions, and leaves them as they are."""

    __path__: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__spec__ = importlib.util.find_spec(_COMPILER)
        self._marked: list[object] = []
        self._within = _Within(_COMPILER, self.give_way)
        later = _Later(_ASKED_FOR_A_CLASS, self.give_way)
        self._modules = {_COMPILER: self, _ASKED_FOR_A_CLASS: later}

    def __getattr__(self, name: str) -> Any:
        if name in _MARKERS:
            return self._mark
        if name.startswith("__"):
            raise AttributeError(name)
        self.give_way()
        return getattr(importlib.import_module(_COMPILER), name)

    def _mark(self, function: object = None, *_: object, **__: object) -> object:
        """A decorator, with or without arguments of its own."""
        if not callable(function):
            return self._mark
        self._marked.append(function)
        return function

    def take_place(self) -> None:
        """Be what is imported as the compiler."""
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._within)

    def give_way(self) -> None:
        """Leave the place to the real module, with nothing kept."""
        if self._within in sys.meta_path:
            sys.meta_path.remove(self._within)
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        for function in self._marked:
            if getattr(function, _CACHE, None) is function:
                delattr(function, _CACHE)
        self._marked.clear()


class _Within(MetaPathFinder):
    """Finds modules within a package, for the import system: the stand-in gives way before one is
    imported, and the package, which is imported then, may have it already."""

    def __init__(self, package: str, give_way: Callable[[], None]) -> None:
        self._package, self._give_way = package, give_way

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{self._package}."):
            return None
        self._give_way()
        importlib.import_module(self._package)
        module = sys.modules.get(name)
        if module is None:
            return importlib.util.find_spec(name)
        spec = ModuleSpec(name, _Made(module))
        vars(module)["__spec__"] = spec  # the import system would take the module's own instead
        return spec


class _Made(Loader):
    """Gives the import system a module that is there already, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec


class _Later(ModuleType):
    """Whose functions and classes are those of the real module, once they are called."""

    __path__: ClassVar[list[str]] = []

    def __init__(self, name: str, give_way: Callable[[], None]) -> None:
        super().__init__(name)
        self._give_way = give_way

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **more: object) -> object:
            self._give_way()
            return getattr(importlib.import_module(self.__name__), name)(*args, **more)

        return call
