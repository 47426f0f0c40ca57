"""Find the plugin that provides a name at an extension point.

    plugin = provider("row-sources", ".parquet")
    rows = load_plugin(plugin).hook.vox_open_rows(reference=..., context=...)

A plugin declares its names under `[provides]` in its manifest and is imported when one of them is
used. Backends are selected by capabilities, hardware and priority instead (select.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vox_core.config import PluginSettings, load_settings
from vox_core.contract import SFT, WriteModelJob
from vox_core.errors import BackendError
from vox_core.host.blocked import blocked_plugins, blocking, unblock
from vox_core.host.discover import Found, discover, known_plugins
from vox_core.host.load import broken, call_hook
from vox_core.host.probe import this_machine, unmet
from vox_core.text import did_you_mean

POINTS = (
    "hooks",
    "row-sources",
    "dedup",
    "objectives",
    "rewards",
    "model-sources",
    "model-formats",
    "launchers",
)
"""Extension points of the core. Plugins may define further ones among themselves."""


def provider(point: str, name: str) -> Found:
    """Return the installed plugin that provides `name` at the extension point `point`.

    Raises:
        BackendError: B013, none does (the remedy installs the catalog's plugin) or it is disabled;
            B014, two do and `[plugin.provider]` in `vox.toml` does not decide.
        ConfigError: the catalog, `vox.toml` or a variable about plugins is wrong.
    """
    plugins = discover()
    usable = providers(point, name, plugins)
    if len(usable) > 1:
        decided = load_settings(PluginSettings, {}).provider.get(f"{point}.{name}")
        usable = [each for each in usable if each.id == decided] or usable
    if len(usable) > 1:
        raise BackendError(
            "B014",
            f"two plugins provide {name!r} ({point})",
            found=" and ".join(each.id for each in usable),
            remedy=f'decide in vox.toml: [plugin.provider] "{point}.{name}" = "{usable[0].id}"',
        )
    if usable:
        return usable[0]
    raise no_provider(point, name, plugins)


def providers(point: str, name: str, plugins: Sequence[Found] | None = None) -> list[Found]:
    """Return all enabled plugins that provide `name`, by id; errors as for `provider`."""
    plugins = discover() if plugins is None else plugins
    blocked = blocked_plugins([each.id for each in plugins])
    able = [each for each in _able(point, name, plugins) if each.id not in blocked]
    return sorted(able, key=lambda each: each.id)


def no_provider(point: str, name: str, plugins: Sequence[Found] | None = None) -> BackendError:
    """Return the error for a name that no installed plugin provides, or only a disabled one."""
    plugins = discover() if plugins is None else plugins
    if able := _able(point, name, plugins):
        first, blocked = able[0].id, blocked_plugins([each.id for each in plugins])
        why = blocking(first, blocked[first]).partition(";")[0]
        return BackendError(
            "B013",
            f"{name!r} ({point}) comes with plugin {first!r}, which is {why}",
            found=f"plugin {first!r} is {why}",
            remedy=unblock(first, blocked[first]),
        )
    catalog = known_plugins().values()
    offered = [each.id for each in catalog if name in each.provides.get(point, ())]
    names = {each for entry in catalog for each in entry.provides.get(point, ())}
    names.update(each for plugin in plugins for each in _names(point, plugin))
    names |= {SFT.name} if point == "objectives" else set()
    hint = did_you_mean(name, sorted(names))
    found, remedy = "nor does the catalog", hint or "`vox plugin list` shows what there is"
    if offered:
        found = f"plugin {offered[0]!r} of the catalog does"
        remedy = f"vox plugin install {offered[0]}"
    elif not hint and (broken_ones := [each.id for each in plugins if each.fault]):
        found = f"plugin {broken_ones[0]!r} is installed but broken, and may be the one that does"
        remedy = f"vox plugin doctor {broken_ones[0]}"
    what = f"no installed plugin provides {name!r} ({point})"
    expected = f"one of {', '.join(sorted(names))}" if names else None
    return BackendError("B013", what, found=found, expected=expected, remedy=remedy)


def write_model(job: WriteModelJob) -> None:
    """Call `vox_write_model` of the plugin that provides `job.format`; errors as for `provider` and
    `call_hook`, and what the plugin raises if it does not support the model or verification fails.
    """
    call_hook(provider("model-formats", job.format), "vox_write_model", job=job)


def _able(point: str, name: str, plugins: Sequence[Found]) -> list[Found]:
    return [each for each in plugins if name in _names(point, each)]


def _names(point: str, plugin: Found) -> Sequence[str]:
    return plugin.manifest.provided.get(point, ()) if plugin.manifest else ()


def usable_plugin(plugin_id: str) -> Found:
    """Return the installed plugin of an id, if it can be used on this machine.

    Raises:
        BackendError: it is disabled, its manifest is invalid, or it does not fit this machine.
        ConfigError: the catalog, `vox.toml` or a variable about plugins is wrong.
    """
    plugins = discover()
    found = next((each for each in plugins if each.id == plugin_id), None)
    if found is None:
        raise BackendError(
            "B003",
            f"plugin {plugin_id!r} is not installed",
            found="metadata of it alone",
            remedy=f"vox plugin install {plugin_id}",
        )
    if found.fault:
        raise found.fault
    if who := blocked_plugins([each.id for each in plugins]).get(plugin_id):
        raise BackendError(
            "B013",
            f"plugin {plugin_id!r} is {blocking(plugin_id, who).partition(';')[0]}",
            remedy=unblock(plugin_id, who),
        )
    assert found.manifest is not None
    if requirement := unmet(found.manifest, this_machine([found])):
        raise broken(found, ": ".join(requirement))
    return found


def missing_command(path: str) -> BackendError | None:
    """Return the error for a command of a catalog plugin that is not installed or not usable."""
    owners = (
        each for each in known_plugins().values() if path in each.provides.get("commands", ())
    )
    if (entry := next(owners, None)) is None:
        return None
    found, verb = "it is not installed", "install"
    if any(each.id == entry.id for each in discover()):
        found, verb = f"{entry.id!r} is installed, but cannot be used", "doctor"
    what = f"`vox {path}` comes with plugin {entry.id!r}"
    return BackendError("B013", what, found=found, remedy=f"vox plugin {verb} {entry.id}")
