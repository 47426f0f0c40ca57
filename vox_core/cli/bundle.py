"""`vox bundle`: list, build, verify, apply."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.lazy import Group, json_option
from vox_core.cli.options import config_option
from vox_core.cli.output import print_columns, print_json, print_table, printable
from vox_core.cli.plugin_install import _carry_out, _plan_options
from vox_core.errors import command

if TYPE_CHECKING:
    from vox_core.catalog import BundleEntry, Catalog
    from vox_core.install.bundle.archive import Bundle

FILE = click.Argument(["file"], type=click.Path(path_type=Path, dir_okay=False))


@click.group("bundle", cls=Group)
def bundle() -> None:
    """Bundle plugins into one file, to install them without a network."""


@bundle.command("list", params=[config_option(exposed=False), json_option()])
def list_bundles(as_json: bool) -> None:
    """List the bundles of the catalog."""
    catalog = _catalog()
    if as_json:
        print_json([_facts(catalog, each) for each in catalog.bundles.values()])
        return
    print_columns(
        (each.id, ", ".join(_plugins(catalog, each)) or "no plugin", each.description)
        for each in catalog.bundles.values()
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
        config_option(exposed=False),
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

    The file holds the wheels of the bundle's plugins, a lock with hashes, and BUNDLE.toml.
    """
    from vox_core.install.bundle.build import build as make

    catalog = _catalog()
    made = make(
        id,
        catalog,
        out,
        wheel_folders=wheels,
        with_dependencies=with_dependencies,
        isolation=not no_build_isolation,
    )
    _show(made, catalog, "built", as_json)
    if not as_json:
        click.echo(printable(f"next: {command('vox', 'bundle', 'apply', out)}"))


@bundle.command("verify", params=[FILE, config_option(exposed=False), json_option()])
def verify(file: Path, as_json: bool) -> None:
    """Check every file in bundle FILE against its lock and the catalog."""
    from vox_core.install.bundle.verify import verify as check

    catalog = _catalog()
    _show(check(file, catalog), catalog, "sound", as_json)


@bundle.command(
    "apply",
    params=[
        FILE,
        click.Option(
            ["--target-python"],
            metavar="PYTHON",
            help="Interpreter of the environment to install into.  [default: that of vox]",
        ),
        config_option(exposed=False),
        *_plan_options(),
    ],
)
def apply(file: Path, target_python: str | None, **how: bool) -> None:
    """Verify bundle FILE and install its wheels without a network.

    Only wheels in the bundle are installed. As with `vox plugin install`, the plan is shown first,
    and a failed installation is rolled back.
    """
    from vox_core.install.bundle.apply import plan_apply

    _carry_out(plan_apply(file, _catalog(), target_python or sys.executable), **how)


def _catalog() -> Catalog:
    from vox_core.known import known

    return known()


def _plugins(catalog: Catalog, entry: BundleEntry) -> list[str]:
    return [plugin.id for plugin in catalog.resolve(entry.id)]


def _facts(catalog: Catalog, entry: BundleEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "description": entry.description,
        "extends": entry.extends,
        "plugins": _plugins(catalog, entry),
    }


def _show(bundle: Bundle, catalog: Catalog, state: str, as_json: bool) -> None:
    """Print the bundle and the wheels that the catalog does not vouch for."""
    from vox_core.install.bundle.archive import beyond_parts

    others = [f"{each.name} {each.version}" for each in beyond_parts(bundle, catalog)]
    if as_json:
        print_json({**asdict(bundle), "not_vouched_for": others})
        return
    about = bundle.about
    print_table(
        {
            state: str(bundle.file),
            "bundle": f"{about.id}: {about.description}",
            "plugins": ", ".join(about.plugins) or "none",
            "wheels": ", ".join(f"{each.name} {each.version}" for each in bundle.wheels),
            "for": f"Python {about.python}, platform {about.platform}",
            **({"not vouched for by the catalog": ", ".join(others)} if others else {}),
        }
    )
