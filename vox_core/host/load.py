"""Load one plugin, and call its hooks as typed functions.

One entry point is imported and registered; pluggy then checks every hook against `HookSpecs`. An
error before a hook is called becomes a `BackendError` (the plugin is broken). An exception of a
hook that is no `VoxError` becomes a `PluginError` (the plugin failed). Both keep the cause. What a
plugin prints while it is imported goes to stderr, because stdout belongs to the command.

select.py chooses the plugin before. Observers are called in child.py.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import pluggy

from vox_core.contract import (
    Event,
    LazyMapping,
    LoadJob,
    MergeJob,
    MergeResult,
    Model,
    RunContext,
    Trainer,
    TrainJob,
    TrainState,
    World,
)
from vox_core.errors import BackendError, PluginError, VoxError
from vox_core.hookspecs import PROJECT, HookSpecs
from vox_core.host.discover import Found
from vox_core.host.judge import Operation

Item = TypeVar("Item")
Result = TypeVar("Result")


def load_backend(found: Found, operation: Operation) -> Backend:
    """Import a backend, register it alone, and check its hooks.

    Raises:
        BackendError: B004; it cannot be imported, has a hook that vox does not have or one with
            other arguments, or lacks the hook of `operation`.
    """
    backend = Backend(found, load_plugin(found))
    backend.require(operation)
    return backend


def load_plugin(found: Found) -> pluggy.PluginManager:
    """Import a plugin of any kind, register it alone, and check its hooks (B004)."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    try:
        with redirect_stdout(sys.stderr):
            _register(manager, found)
    except pluggy.PluginValidationError as error:
        hooks = ", ".join(name for name in vars(HookSpecs) if name.startswith("vox_"))
        expected = f"hooks as in vox_core.hookspecs: {hooks}"
        raise broken(found, format_error(error), expected) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything at all
        raise broken(found, format_error(error)) from error
    return manager


def call_hook(found: Found, hook: str, **arguments: object) -> Any:
    """Load a plugin and call one of its hooks.

    Raises:
        BackendError: B004; it cannot be loaded, or lacks the hook.
        PluginError: X001, the hook raised something of its own.
    """
    manager = load_plugin(found)
    _require_hook(manager, found, hook)
    with foreign_errors(found.id, hook, "plugin"):
        return getattr(manager.hook, hook)(**arguments)


def _require_hook(manager: pluggy.PluginManager, found: Found, hook: str) -> None:
    if not getattr(manager.hook, hook).get_hookimpls():
        raise broken(found, f"no {hook}", f"{hook}, marked with @hookimpl")


Observe: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""


@dataclass(frozen=True, slots=True)
class Context:
    """`vox_core.contract.RunContext` of a single process."""

    scratch: Path
    emit: Observe = ignore
    world: World = field(default_factory=World)


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """A loaded backend; each call checks the result's type, or raises a `VoxError`."""

    found: Found
    manager: pluggy.PluginManager

    @property
    def id(self) -> str:
        return self.found.id

    @property
    def one_pass(self) -> bool:
        """Whether `Trainer.accumulate` takes `weigh`."""
        manifest = self.found.manifest
        return manifest is not None and manifest.is_backend and manifest.capabilities.one_pass

    @property
    def version(self) -> str:
        return self.found.shown_version

    def train(self, job: TrainJob, context: RunContext) -> Trainer:
        """Call `vox_train`."""
        trainer = self._expect(Trainer, "train", job, context)  # type: ignore[type-abstract]
        return cast("Trainer", _Guarded(self.id, trainer))

    def merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        """Call `vox_merge`; its tensors are computed lazily, one at a time."""
        result = self._expect(MergeResult, "merge", job, context)
        return MergeResult(_guarded_items(self.id, "vox_merge", result.tensors))

    def load(self, job: LoadJob, context: RunContext) -> Model:
        """Call `vox_load`."""
        model = self._expect(Model, "load", job, context)  # type: ignore[type-abstract]
        return cast("Model", _Guarded(self.id, model))

    def require(self, operation: Operation) -> None:
        """Check that the backend has the hook (B004)."""
        _require_hook(self.manager, self.found, f"vox_{operation}")

    def _call(self, operation: Operation, job: object, context: RunContext) -> object:
        self.require(operation)
        with foreign_errors(self.id, f"vox_{operation}"):
            result: object = getattr(self.manager.hook, f"vox_{operation}")(
                job=job, context=context
            )
        return result

    def _expect(
        self, kind: type[Result], operation: Operation, job: object, context: RunContext
    ) -> Result:
        result = self._call(operation, job, context)
        if not isinstance(result, kind):
            raise _wrong_result(self.id, f"vox_{operation}", result, kind.__name__)
        return result


class _Guarded:
    """A `Model` or `Trainer` whose foreign exceptions become `PluginError`."""

    def __init__(self, plugin: str, model: Model) -> None:
        self._plugin, self._model = plugin, model

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._model, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with foreign_errors(self._plugin, name):
                return method(*args, **kwargs)

        return guarded

    def state(self, learner: str) -> TrainState:
        """Return a learner's state; what the views of a whole model raise is guarded, too."""
        state: TrainState = self.__getattr__("state")(learner)
        if state.adapter.method != "full":
            return state

        def guarded(values: Mapping[str, Item]) -> Mapping[str, Item]:
            return LazyMapping(values, foreign_errors(self._plugin, "state")(values.__getitem__))

        saved, moments = guarded(state.adapter.saved), guarded(state.moments)
        return replace(state, adapter=replace(state.adapter, saved=saved), moments=moments)


def _register(manager: pluggy.PluginManager, found: Found) -> None:
    plugin: object = found.entry_point.load()
    if inspect.isclass(plugin):  # pluggy would register the class's functions without self
        raise TypeError(f"{plugin.__name__} is a class; the entry point has to name an object")
    manager.register(plugin, name=found.id)
    manager.check_pending()


def _guarded_items(plugin: str, hook: str, items: Iterator[Item]) -> Iterator[Item]:
    with foreign_errors(plugin, hook):
        yield from items


@contextmanager
def foreign_errors(plugin: str, hook: str, kind: str = "backend") -> Iterator[None]:
    """Map exceptions other than `VoxError` to `PluginError`; Ctrl-C passes through."""
    try:
        yield
    except VoxError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            "X001",
            f"{kind} {plugin!r} failed in {hook}",
            found=f"{format_error(error)} ({raised_at(error)})",
            remedy="see the traceback with --debug, and report it to the plugin's authors",
        ) from error


def _wrong_result(plugin: str, hook: str, result: object, expected: str) -> PluginError:
    return PluginError(
        "X001",
        f"backend {plugin!r} gave a wrong result from {hook}",
        found="None" if result is None else f"an object of type {type(result).__name__}",
        expected=expected,
        remedy="upgrade the plugin, or report it to the plugin's authors",
    )


def broken(found: Found, what_is: str, expected: str | None = None) -> BackendError:
    """Return the error for a broken plugin of any kind."""
    backend = found.manifest is not None and found.manifest.is_backend
    return BackendError(
        "B004",
        f"{'backend' if backend else 'plugin'} {found.id!r} is installed but broken",
        where=f"{found.distribution} {found.version}, entry point {found.entry_point.value}",
        found=what_is,
        expected=expected,
        remedy=found.upgrade_or_report + ("; or choose another with --backend" if backend else ""),
    )


def raised_at(error: BaseException) -> str:
    """Return file and line of the innermost frame that is not an installed library's."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([each for each in frames if "site-packages" not in each.filename] or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def format_error(error: BaseException) -> str:
    """Format an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
