"""`vox bundle`: list, build, verify, install, lock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from vox_bundle.archive import Bundle
from vox_bundle.build import build as build_bundle
from vox_bundle.install import plan_bundle
from vox_bundle.lock import write_lock
from vox_bundle.verify import verify as verify_bundle
from vox_core.api.commands import (
    Group,
    json_option,
    print_columns,
    print_json,
    print_table,
    printable,
)
from vox_core.api.installing import (
    Catalog,
    Environment,
    carry_out,
    config_option,
    known,
    plan_options,
)
from vox_core.errors import command

FILE = click.Argument(["file"], type=click.Path(path_type=Path, dir_okay=False))


@click.group("bundle", cls=Group)
def bundle() -> None:
    """Bundle plugins into one file, to install them without a network."""


@bundle.command("list", params=[config_option(), json_option()])
def list_bundles(as_json: bool) -> None:
    """List the bundles of the catalog."""
    catalog = known()
    plugins = {id: [each.id for each in catalog.resolve(id)] for id in catalog.bundles}
    if as_json:
        print_json(
            [
                {
                    "id": id,
                    "description": each.description,
                    "extends": each.extends,
                    "plugins": plugins[id],
                }
                for id, each in catalog.bundles.items()
            ]
        )
        return
    print_columns(
        (id, ", ".join(plugins[id]) or "no plugin", each.description)
        for id, each in catalog.bundles.items()
    )


@bundle.command(
    "build",
    params=[
        click.Argument(["id"], metavar="ID"),
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path, dir_okay=False),
            required=True,
            help="File to write; an existing one is replaced.",
        ),
        click.Option(
            ["--wheels"],
            type=click.Path(path_type=Path, exists=True, file_okay=False),
            multiple=True,
            help="Folder of wheels to prefer over the catalog's sources. Repeatable.",
        ),
        click.Option(
            ["--with-dependencies"],
            is_flag=True,
            help="Include the plugins' dependencies, as uv resolves them.",
        ),
        click.Option(
            ["--no-build-isolation"],
            is_flag=True,
            help="Build wheels with the build tools of this environment.",
        ),
        config_option(),
        json_option(),
    ],
)
def build(
    id: str,
    out: Path,
    wheels: tuple[Path, ...],
    with_dependencies: bool,
    no_build_isolation: bool,
    as_json: bool,
) -> None:
    """Build the file of bundle ID for this platform and Python version.

    The file holds the wheels of the bundle's plugins and a lock with their hashes.
    """
    catalog = known()
    made = build_bundle(
        id,
        catalog,
        out,
        wheel_folders=wheels,
        with_dependencies=with_dependencies,
        isolation=not no_build_isolation,
    )
    _show(made, catalog, "built", as_json)
    if not as_json:
        click.echo(printable(f"next: {command('vox', 'bundle', 'install', out)}"))


@bundle.command("verify", params=[FILE, config_option(), json_option()])
def verify(file: Path, as_json: bool) -> None:
    """Check every file in bundle FILE against its lock and the catalog."""
    catalog = known()
    _show(verify_bundle(file, catalog), catalog, "sound", as_json)


@bundle.command("install", params=[FILE, config_option(), *plan_options()])
def install(file: Path, **how: bool) -> None:
    """Verify bundle FILE and install its wheels without a network.

    Only wheels in the bundle are installed. As with `vox plugin install`, the plan is shown first,
    and a failed installation is rolled back.
    """
    carry_out(plan_bundle(file, known()), **how)


@bundle.command(
    "lock",
    params=[
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            default="pylock.toml",
            show_default=True,
            help="File to write.",
        ),
        json_option(),
    ],
)
def lock(out: Path, as_json: bool) -> None:
    """Write pylock.toml (PEP 751) with the installed plugins and all their dependencies."""
    unhashed = write_lock(out, Environment.here())
    if as_json:
        print_json({"lock": out, "without_hash": unhashed})
        return
    click.echo(f"lock  {out}")
    if unhashed:
        click.echo(f"without a hash: {', '.join(unhashed)}", err=True)


def _show(bundle: Bundle, catalog: Catalog, state: str, as_json: bool) -> None:
    """Print the bundle and the wheels that the catalog does not vouch for."""
    others = bundle.dependencies(catalog)
    plugins = [plugin.id for plugin in catalog.resolve(bundle.id)]
    if as_json:
        facts = {"file": bundle.file, "id": bundle.id, "vox": bundle.vox, "plugins": plugins}
        print_json({**facts, "wheels": bundle.wheels, "not_vouched_for": others})
        return
    rows: Mapping[str, Any] = {
        state: str(bundle.file),
        "bundle": f"{bundle.id}: {catalog.bundle(bundle.id).description}",
        "plugins": ", ".join(plugins) or "none",
        "wheels": ", ".join(wheel.file for wheel in bundle.wheels),
        **({"not vouched for by the catalog": ", ".join(others)} if others else {}),
    }
    print_table(rows)
