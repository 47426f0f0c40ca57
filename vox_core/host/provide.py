"""Find the plugin that provides a name at an extension point.

    plugin = provider("row-sources", ".parquet")
    rows = load_plugin(plugin).hook.vox_open_rows(reference=..., context=...)

A plugin declares its names under `[provides]` in its manifest and is imported when one of them is
used. Backends are selected by capabilities, hardware and priority instead (select.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from vox_core.contract import WriteModelJob
from vox_core.errors import BackendError
from vox_core.host.blocked import blocked_plugins, blocking, unblock
from vox_core.host.discover import Found, discover
from vox_core.host.known import known_plugins
from vox_core.host.load import broken, foreign_errors, load_plugin
from vox_core.host.machine import this_machine, unmet

POINTS = (
    "hooks",
    "row-sources",
    "dedup",
    "objectives",
    "model-sources",
    "model-formats",
    "launchers",
)
"""Extension points of the core. Plugins may define further ones among themselves."""


def provider(
    point: str,
    name: str,
    found: Sequence[Found] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Found:
    """Return the installed plugin that provides `name` at the extension point `point`.

    Args:
        found: installed plugins; by default those of this environment.

    Raises:
        BackendError: B013, none does (the remedy installs the catalog's plugin) or it is disabled;
            B014, two do and `[plugin.provider]` in `vox.toml` does not decide.
        ConfigError: the catalog, `vox.toml` or a variable about plugins is wrong.
    """
    plugins = discover() if found is None else found
    usable = providers(point, name, plugins, environ)
    if len(usable) > 1:
        usable = [each for each in usable if each.id == _decided(point, name, environ)] or usable
    if len(usable) == 1:
        return usable[0]
    if usable:
        ids = " and ".join(each.id for each in usable)
        raise BackendError(
            "B014",
            f"two plugins provide {name!r} ({point})",
            found=ids,
            remedy=f'decide in vox.toml: [plugin.provider] "{point}.{name}" = "{usable[0].id}"',
        )
    raise no_provider(point, name, plugins, environ)


def providers(
    point: str,
    name: str,
    found: Sequence[Found] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Found]:
    """Return all enabled plugins that provide `name`, by id; arguments and errors as for
    `provider`."""
    plugins = discover() if found is None else found
    blocked = blocked_plugins([each.id for each in plugins], environ)
    able = [each for each in _able(point, name, plugins) if each.id not in blocked]
    return sorted(able, key=lambda each: each.id)


def no_provider(
    point: str,
    name: str,
    found: Sequence[Found] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> BackendError:
    """Return the error for a name that no installed plugin provides, or only a disabled one."""
    plugins = discover() if found is None else found
    if able := _able(point, name, plugins):
        first, blocked = able[0].id, blocked_plugins([each.id for each in plugins], environ)
        why = blocking(first, blocked[first]).partition(";")[0]
        return BackendError(
            "B013",
            f"{name!r} ({point}) comes with plugin {first!r}, which is {why}",
            found=f"plugin {first!r} is {why}",
            remedy=unblock(first, blocked[first]),
        )
    offered = [
        entry.id
        for entry in known_plugins(environ).values()
        if name in entry.provides.get(point, ())
    ]
    return BackendError(
        "B013",
        f"no installed plugin provides {name!r} ({point})",
        found=f"plugin {offered[0]!r} of the catalog does" if offered else "nor does the catalog",
        remedy=f"vox plugin install {offered[0]}"
        if offered
        else "`vox plugin list` shows what there is",
    )


def write_model(job: WriteModelJob) -> None:
    """Call `vox_write_model` of the plugin that provides `job.format`.

    Raises:
        BackendError: B013 or B014 (`provider`); B004, the plugin is broken or lacks the hook.
        PluginError: X001, the hook raised an exception other than `VoxError`.
        VoxError: the format does not support the model, or verification failed.
    """
    found = provider("model-formats", job.format)
    hook = load_plugin(found).hook.vox_write_model
    if not hook.get_hookimpls():
        raise broken(found, "no vox_write_model", "vox_write_model, marked with @hookimpl")
    with foreign_errors(found.id, "vox_write_model"):
        hook(job=job)


def _able(point: str, name: str, plugins: Sequence[Found]) -> list[Found]:
    return [
        each for each in plugins if each.manifest and name in each.manifest.provided.get(point, ())
    ]


def usable_plugin(plugin_id: str, environ: Mapping[str, str] = os.environ) -> Found:
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
    if who := blocked_plugins([each.id for each in plugins], environ).get(plugin_id):
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
    for entry in known_plugins().values():
        if path in entry.provides.get("commands", ()):
            installed = any(each.id == entry.id for each in discover())
            return BackendError(
                "B013",
                f"`vox {path}` comes with plugin {entry.id!r}",
                found=f"{entry.id!r} is installed, but cannot be used"
                if installed
                else "it is not installed",
                remedy=f"vox plugin doctor {entry.id}"
                if installed
                else f"vox plugin install {entry.id}",
            )
    return None


def _decided(point: str, name: str, environ: Mapping[str, str]) -> str | None:
    from vox_core.config import PluginSettings, load_settings

    return load_settings(PluginSettings, {}, environ=environ).provider.get(f"{point}.{name}")
