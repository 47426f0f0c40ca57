"""Find the plugin that provides a name, load it, and call its hooks as typed functions.

    plugin = provider("row-sources", ".parquet")
    stream = call_hook(plugin, "vox_open_rows", reference=...)

A plugin declares its names under `[provides]` in its manifest and is imported when one of them is
used. Backends are selected by capabilities, hardware and priority instead (select.py).

One entry point is imported and registered; pluggy then checks every hook against `HookSpecs`. An
error before a hook is called becomes a `BackendError` (the plugin is broken). An exception of a
hook that is no `VoxError` becomes a `PluginError` (the plugin failed). Both keep the cause. What a
plugin prints while it is imported goes to stderr, because stdout belongs to the command.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import click
import pluggy

from vox_core.config import SECTIONS, PluginSettings, Section, load_settings
from vox_core.contract import (
    SFT,
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
    WriteModelJob,
)
from vox_core.errors import BackendError, ConfigError, PluginError, VoxError
from vox_core.hookspecs import PROJECT, HookSpecs
from vox_core.host.blocked import blocked_plugins, blocking, unblock
from vox_core.host.discover import Found, discover, known_plugins
from vox_core.host.judge import Operation, on_one_line
from vox_core.host.manifest import Manifest
from vox_core.host.probe import this_machine, unmet
from vox_core.text import did_you_mean, hint

_REPORT = "see the traceback with --debug, and report it to the plugin's authors"
Item = TypeVar("Item")
S = TypeVar("S", bound=Section)


def load_backend(found: Found, operation: Operation) -> Backend:
    """Import a backend, register it alone, and check its hooks and that it has the hook of
    `operation` (B004)."""
    backend = Backend(found, load_plugin(found))
    backend.require(operation)
    return backend


def load_plugin(found: Found) -> pluggy.PluginManager:
    """Import a plugin of any kind, register it alone, and check its hooks (B004)."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    with _importing(found):
        plugin: object = found.entry_point.load()
        if inspect.isclass(plugin):  # pluggy would register its functions without self
            what = f"{plugin.__name__} is a class; the entry point has to name an object"
            raise TypeError(what)
        try:
            manager.register(plugin, name=found.id)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise broken(found, format_error(error), _hooks_meant(plugin, manager)) from error
    return manager


@contextmanager
def _importing(found: Found, where: str = "") -> Iterator[None]:
    """Refuse a plugin that does not fit this machine, and map what it raises while it is imported
    to B004; what it prints goes to stderr."""
    if found.manifest and (requirement := unmet(found.manifest, this_machine())):
        raise broken(found, ": ".join(requirement))
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, BackendError):
        raise
    except BaseException as error:  # a plugin may raise anything at all
        raise broken(found, where + format_raised(error)) from error


def _hooks_meant(plugin: object, manager: pluggy.PluginManager) -> str:
    """Return the signatures of a plugin's hooks, or the name nearest to one that is unknown."""
    specs = {name: caller.spec for name, caller in vars(manager.hook).items() if caller.has_spec()}
    marked = [name for name in dir(plugin) if hasattr(getattr(plugin, name), f"{PROJECT}_impl")]
    if unknown := [name for name in marked if name not in specs]:
        return f"a hook of vox_core.hookspecs{hint(unknown[0], specs)}"
    return ", ".join(f"{name}({', '.join(specs[name].argnames)})" for name in marked)


def load_command(found: Found, entry: str) -> click.Command:
    """Import a plugin's command, `module:attribute` (B004)."""
    module, _, attribute = entry.partition(":")
    with _importing(found, f"{entry}: "):
        command: object = getattr(importlib.import_module(module), attribute)
    if not isinstance(command, click.Command):
        raise broken(found, f"{entry}: {_described(command)}", "a click command")
    return command


def raised_by_plugin(error: BaseException) -> PluginError | None:
    """Return the error for an exception of a plugin's own code; None for one of vox's."""
    plugins = {each.entry_point.module.partition(".")[0]: each for each in discover()}
    names = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in names]
    own = [each for each in packages if each in plugins or each == "vox_core"]
    if not own or own[-1] == "vox_core":
        return None
    what = f"plugin {plugins[own[-1]].id!r} failed"
    return PluginError("X001", what, found=format_raised(error), remedy=_REPORT)


def call_hook(found: Found, hook: str, returns: type = object, **arguments: object) -> Any:
    """Load a plugin and call one of its hooks.

    Raises:
        BackendError: B004; it cannot be loaded, or lacks the hook.
        PluginError: X001, the hook raised something of its own, or its result is of another type.
    """
    return _called(found, load_plugin(found), hook, returns, **arguments)


def _called(
    found: Found, manager: pluggy.PluginManager, hook: str, returns: type, **arguments: object
) -> Any:
    _require_hook(manager, found, hook)
    with foreign_errors(found.id, hook, _kind(found)):
        result = getattr(manager.hook, hook)(**arguments)
    if not isinstance(result, returns):
        raise wrong_result(found, hook, returns.__name__, result)
    return result


def _require_hook(manager: pluggy.PluginManager, found: Found, hook: str) -> None:
    if not getattr(manager.hook, hook).get_hookimpls():
        raise broken(found, f"no {hook}", f"{hook}, marked with @hookimpl")


Observe: TypeAlias = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Observe nothing."""


@dataclass(frozen=True, slots=True)
class Context:
    """`vox_core.contract.RunContext` of a process."""

    emit: Observe = ignore
    world: World = field(default_factory=World)


LAUNCHED = "VOX_LAUNCHED"
"""Variable of a process that a launcher started as a rank: `vox_core.cli.rank` sets it."""
_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


def world_of(environ: Mapping[str, str] = os.environ) -> World:
    """Return this process's rank and the number of ranks, from torchrun's variables if vox or
    torchrun has set them: other programs leave them behind (C002 if they are no such numbers)."""
    if not environ.keys() & {LAUNCHED, _BY_TORCHRUN}:
        return World()
    rank, size = environ.get("RANK", "0"), environ.get("WORLD_SIZE", "1")
    if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
        return World(int(rank), int(size))
    raise ConfigError(
        "C002",
        "the variables that number the processes of a run are not valid",
        where="environment",
        found=f"RANK={rank} WORLD_SIZE={size}",
        expected="WORLD_SIZE of 1 or more, and RANK below",
        remedy="unset both, or start the processes with vox train --processes N",
    )


def require_example_each(processes: int, examples: int) -> None:
    """Refuse more processes than a step has examples (C004)."""
    if examples < processes:
        what = "a step has fewer examples than there are processes"
        where = f"--processes {processes}"
        found = f"{examples} example{'' if examples == 1 else 's'} in a step"
        remedy = f"use --processes {examples} or fewer, or a larger --batch-size"
        raise ConfigError("C004", what, where=where, found=found, remedy=remedy)


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """A loaded backend; each call checks the result's type, or raises a `VoxError`."""

    found: Found
    manager: pluggy.PluginManager

    @property
    def id(self) -> str:
        return self.found.id

    @property
    def manifest(self) -> Manifest:
        """The plugin's manifest, without which it would not have been chosen."""
        assert self.found.manifest is not None, self.id
        return self.found.manifest

    def train(self, job: TrainJob, context: RunContext) -> Trainer:
        return cast("Trainer", _Guarded(self.found, self._result(Trainer, "train", job, context)))

    def merge(self, job: MergeJob, context: RunContext) -> MergeResult:
        """Call `vox_merge`; its tensors are computed lazily, one at a time."""
        result: MergeResult = self._result(MergeResult, "merge", job, context)
        return MergeResult(_guarded_items(self.id, "vox_merge", result.tensors))

    def load(self, job: LoadJob, context: RunContext) -> Model:
        return cast("Model", _Guarded(self.found, self._result(Model, "load", job, context)))

    def require(self, operation: Operation) -> None:
        """Check that the backend has the hook (B004)."""
        _require_hook(self.manager, self.found, f"vox_{operation}")

    def _result(self, kind: type, operation: Operation, job: object, context: RunContext) -> Any:
        return _called(self.found, self.manager, f"vox_{operation}", kind, job=job, context=context)


def wrong_result(found: Found, hook: str, expected: str, result: object) -> PluginError:
    """Return the error for a result of another type or shape."""
    what = f"{_kind(found)} {found.id!r} gave a wrong result from {hook}"
    remedy = "upgrade the plugin, or report it to the plugin's authors"
    return PluginError("X001", what, found=_described(result), expected=expected, remedy=remedy)


def _described(result: object) -> str:
    if hasattr(result, "dtype") and hasattr(result, "shape"):
        return f"{result.dtype} {result.shape}"
    if inspect.isclass(result):
        return f"the class {result.__name__}"
    return "None" if result is None else f"an object of type {type(result).__name__}"


def _kind(found: Found) -> str:
    return "backend" if found.manifest is not None and found.manifest.is_backend else "plugin"


_RESULTS = {"update": float, "state": TrainState}


class _Guarded:
    """A `Model` or `Trainer` whose foreign exceptions and wrong results become `PluginError`."""

    def __init__(self, plugin: Found, model: Model) -> None:
        self._plugin, self._model, self._closed = plugin, model, False

    def __getattr__(self, name: str) -> Any:
        if self._closed:
            raise ConfigError("C004", "the model is closed", remedy="open it again")
        method = getattr(self._model, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with foreign_errors(self._plugin.id, name):
                result = method(*args, **kwargs)
                if name in ("log_probs", "accumulate"):
                    batch = args[0] if args else kwargs["batch"]
                    if _described(result) != (like := f"float32 {batch.targets_T.shape}"):
                        raise wrong_result(self._plugin, name, like, result)
                elif not isinstance(result, kind := _RESULTS.get(name, object)):
                    raise wrong_result(self._plugin, name, kind.__name__, result)
            return result

        return guarded

    def close(self) -> None:
        """Close it, once."""
        if not self._closed:
            self.__getattr__("close")()
            self._closed = True

    def state(self, learner: str) -> TrainState:
        """Return a learner's state; what the views of a whole model raise is guarded, too."""
        state: TrainState = self.__getattr__("state")(learner)
        if state.adapter.method != "full":
            return state

        def guarded(values: Mapping[str, Item]) -> Mapping[str, Item]:
            return LazyMapping(values, foreign_errors(self._plugin.id, "state")(values.__getitem__))

        saved, moments = guarded(state.adapter.saved), guarded(state.moments)
        return replace(state, adapter=replace(state.adapter, saved=saved), moments=moments)


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
        what = f"{kind} {plugin!r} failed in {hook}"
        raise PluginError("X001", what, found=format_raised(error), remedy=_REPORT) from error


def broken(found: Found, what_is: str, expected: str | None = None) -> BackendError:
    """Return the error for a broken plugin of any kind."""
    another = "; or choose another with --backend" if _kind(found) == "backend" else ""
    return BackendError(
        "B004",
        f"{_kind(found)} {found.id!r} is installed but broken",
        where=f"{found.distribution} {found.version}, entry point {found.entry_point.value}",
        found=what_is,
        expected=expected,
        remedy=found.upgrade_or_report + another,
    )


def format_raised(error: BaseException) -> str:
    """Format an exception on one line, with the place where a plugin raised it.

    That is the innermost frame outside vox_core and Python, of an installed package only if there
    is no other. None, if vox itself could not call the plugin: the arguments do not fit.
    """
    skipped = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<frozen")
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if "site-packages" in each.filename or not each.filename.startswith(skipped)
    ]
    frames = [each for each in frames if "site-packages" not in each.filename] or frames
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{format_error(error)}{place}"


def format_error(error: BaseException) -> str:
    """Format an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


POINTS = {
    "row-sources": "vox_open_rows",
    "dedup": "vox_near_duplicates",
    "objectives": "vox_objective",
    "rewards": "vox_reward",
    "model-formats": "vox_write_model",
    "launchers": "vox_launch",
    "job-formats": "vox_write_job",
    "settings": "vox_settings",
}
"""Extension points of the core, with their hooks. Plugins may define further ones."""


def provider(point: str, name: str, plugins: Sequence[Found] | None = None) -> Found:
    """Return the installed plugin that provides `name` at the extension point `point`.

    Raises:
        BackendError: B013, none does (the remedy installs the catalog's plugin) or it is disabled;
            B014, two do and `[plugin.provider]` in `vox.toml` does not decide.
        ConfigError: the catalog, `vox.toml` or a variable about plugins is wrong.
    """
    usable = providers(point, name, plugins)
    if len(usable) > 1:
        decided = load_settings(PluginSettings, {}).provider.get(f"{point}.{name}")
        usable = [each for each in usable if each.id == decided] or usable
    if len(usable) > 1:
        what, found = f"two plugins provide {name!r} ({point})", [each.id for each in usable]
        ids = '" or "'.join(found)
        remedy = f'decide in vox.toml: [plugin.provider] "{point}.{name}" = "{ids}"'
        raise BackendError("B014", what, found=" and ".join(found), remedy=remedy)
    if usable:
        return usable[0]
    raise no_provider(point, name, plugins)


def providers(point: str, name: str, plugins: Sequence[Found] | None = None) -> list[Found]:
    """Return all enabled plugins that provide `name`, in order; errors as for `provider`."""
    plugins = discover() if plugins is None else plugins
    blocked = blocked_plugins([each.id for each in plugins])
    return [each for each in _able(point, name, plugins) if each.id not in blocked]


def no_provider(point: str, name: str, plugins: Sequence[Found] | None = None) -> BackendError:
    """Return the error for a name that no installed plugin provides, or only a disabled one."""
    plugins = discover() if plugins is None else plugins
    if able := _able(point, name, plugins):
        blocked = blocked_plugins([each.id for each in plugins])
        what = f"{name!r} ({point}) comes with plugin {able[0].id!r}"
        return _blocked(what, able[0].id, blocked)
    offered = [e.id for e in known_plugins().values() if name in e.provides.get(point, ())]
    names = names_at(point, plugins) | ({SFT.name} if point == "objectives" else set())
    hint = did_you_mean(name, sorted(names))
    found, remedy = "no plugin of the catalog does", hint or "`vox plugin list` shows what there is"
    if offered:
        found = f"plugin {offered[0]!r} of the catalog does"
        remedy = f"vox plugin install {offered[0]}"
    elif not hint and (broken_ones := [each.id for each in plugins if each.fault]):
        found = f"plugin {broken_ones[0]!r} is installed but broken, and may be the one that does"
        remedy = f"vox plugin doctor {broken_ones[0]}"
    what = f"no installed plugin provides {name!r} ({point})"
    expected = f"one of {', '.join(sorted(names))}" if names else None
    return BackendError("B013", what, found=found, expected=expected, remedy=remedy)


def _blocked(what: str, plugin_id: str, blocked: Mapping[str, str]) -> BackendError:
    why = blocking(plugin_id, who := blocked[plugin_id]).partition(";")[0]
    found = f"plugin {plugin_id!r} is {why}"
    return BackendError("B013", what, found=found, remedy=unblock(plugin_id, who))


def write_model(job: WriteModelJob) -> None:
    """Call `vox_write_model` of the plugin that provides `job.format`; errors as for `provider` and
    `call_hook`, and what the plugin raises if it does not support the model or verification fails.
    """
    call_hook(provider("model-formats", job.format), "vox_write_model", job=job)


def read_settings(kind: type[S], flags: Mapping[str, Any]) -> S:
    """Load settings as `load_settings` does; refuse one of no plugin, broken or not (C001)."""

    def others() -> Collection[str] | None:
        plugins = discover()
        return names_at("settings", plugins) if all(each.manifest for each in plugins) else None

    return load_settings(kind, flags, others=others)


def section_of(found: Found, name: str) -> type[Section]:
    """Return a section that a plugin declares in `settings`; errors as for `call_hook`."""
    kind: type = call_hook(found, "vox_settings", type, section=name)
    if not issubclass(kind, Section) or getattr(kind, "section", "") != name:
        raise wrong_result(found, "vox_settings", f"a Section with section = {name!r}", kind)
    faults = [f"{key} without a default" for key, f in kind.model_fields.items() if f.is_required()]
    faults += [] if re.fullmatch("[a-z][a-z0-9]*", name) else [f"the name {name!r}"]
    if faults:
        raise broken(found, ", ".join(faults), "a default for each field, and a name of a-z, 0-9")
    return kind


def sections(tell: Callable[[str], None]) -> Iterator[type[Section]]:
    """Yield the sections of the core and of installed plugins; `tell` gets a broken one's fault."""
    yield from SECTIONS
    plugins, own = discover(), {kind.section for kind in SECTIONS}
    for name in sorted({n for each in plugins for n in names_of("settings", each)} - own):
        try:
            if providers("settings", name, plugins):  # not of a disabled plugin alone
                yield section_of(provider("settings", name, plugins), name)
        except (BackendError, PluginError) as error:
            tell(f"[{name}] is left out: {on_one_line(error)}; {error.remedy}")


def names_at(point: str, plugins: Sequence[Found]) -> set[str]:
    """Return the names at an extension point of these plugins and of the catalog's."""
    catalog = (entry.provides.get(point, ()) for entry in known_plugins().values())
    return set().union(*catalog, *(names_of(point, plugin) for plugin in plugins))


def _able(point: str, name: str, plugins: Sequence[Found]) -> list[Found]:
    return [each for each in plugins if name in names_of(point, each)]


def names_of(point: str, plugin: Found) -> Sequence[str]:
    """Return the names that one plugin declares at an extension point, or its commands."""
    return plugin.manifest.provided.get(point, ()) if plugin.manifest else ()


def usable_plugin(plugin_id: str) -> Found:
    """Return the installed plugin of an id: one that is valid (or its fault) and not disabled
    (B013)."""
    plugins = discover()
    found = next((each for each in plugins if each.id == plugin_id), None)
    if found is None:
        what, remedy = f"plugin {plugin_id!r} is not installed", f"vox plugin install {plugin_id}"
        raise BackendError("B003", what, found="metadata of it alone", remedy=remedy)
    if found.fault:
        raise found.fault
    if plugin_id in (blocked := blocked_plugins([each.id for each in plugins])):
        raise _blocked(f"plugin {plugin_id!r} cannot be used", plugin_id, blocked)
    return found


def missing_command(path: str) -> BackendError | None:
    """Return the error for (the first words of) a command of a plugin that cannot be used."""
    for entry in known_plugins().values():
        if any(f"{name} ".startswith(f"{path} ") for name in entry.provides.get("commands", ())):
            break
    else:
        return None
    found, verb = "it is not installed", "install"
    if any(each.id == entry.id for each in discover()):
        found, verb = f"{entry.id!r} is installed, but cannot be used", "doctor"
    what = f"`vox {path}` comes with plugin {entry.id!r}"
    return BackendError("B013", what, found=found, remedy=f"vox plugin {verb} {entry.id}")
