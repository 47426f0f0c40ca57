"""`vox config`: schema, show."""

from __future__ import annotations

import json
from typing import Any

import click

from vox_core.cli.lazy import Group, json_option
from vox_core.cli.options import config_option, settings_from
from vox_core.cli.output import print_json, warn
from vox_core.config import Section, toml_schema
from vox_core.errors import SOURCES
from vox_core.host.load import sections
from vox_core.text import hint


@click.group("config", cls=Group)
def config() -> None:
    """Show the settings in effect and where they come from."""


@config.command("schema")
def schema() -> None:
    """Print the JSON schema of vox.toml."""
    click.echo(json.dumps(toml_schema([*sections(warn)]), indent=2))


_SECTION = click.Argument(["section"], required=False)


@config.command("show", params=[_SECTION, config_option(), json_option()])
def show(section: str | None, as_json: bool) -> None:
    """Show every setting of vox and its plugins, its value and where the value comes from.

    SECTION, such as train, leaves out the others. Without --json it prints a valid vox.toml.
    """
    found = {kind.section: kind for kind in sections(warn)}
    if section and section not in found:
        what = f"there is no section {section}{hint(section, found)}"
        raise click.UsageError(f"{what}; vox config show has all of them")
    chosen = [found[section]] if section else found.values()
    loaded = [(kind, settings_from(kind, {}), SOURCES.get({})) for kind in chosen]
    if as_json:
        print_json({kind.section: _values(settings) for kind, settings, _ in loaded})
        return
    for number, (kind, settings, sources) in enumerate(loaded):
        click.echo(f"{chr(10) if number else ''}[{kind.section}]")
        for name, value in zip(kind.own_fields(), _values(settings).values(), strict=True):
            key = name.replace("_", "-")  # an unset one is a comment, for TOML has no null
            text = f"# {key} =" if value is None else f"{key} = {_toml_value(value)}"
            click.echo(f"{text:<36}  # {sources.get(name, 'default')}")


def _values(settings: Section) -> dict[str, Any]:
    return settings.model_dump(mode="json", by_alias=True, include=set(settings.own_fields()))


def _toml_value(value: Any) -> str:
    """Format a value as TOML, which is JSON except for tables."""
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    pairs = ", ".join(f"{json.dumps(key)} = {_toml_value(each)}" for key, each in value.items())
    return f"{{ {pairs} }}" if pairs else "{}"
