"""Click options generated from a settings section, and settings built from their values.

A pydantic section is the only list of its flags. Pydantic receives the values as typed, so that all
faults of a command line are reported together, in the same words as those of `vox.toml`. Click has
no defaults; pydantic sets them. A data file `-` is stdin, stored in the cache.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click

from vox_core.config import CONFIG_FILE, DataSource, Section, given, is_table, reading
from vox_core.config.sections import is_duration, kebab
from vox_core.data.formats import keep_rows
from vox_core.errors import ConfigError
from vox_core.host.load import read_settings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class DataFile(click.Path):
    """A data file; `-` stores stdin in the cache and becomes that file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value != "-":
            return super().convert(value, param, ctx)
        kept = keep_rows(iter(lambda: sys.stdin.buffer.read(1 << 20), b""), "stdin")
        click.echo(f"rows from stdin are stored in {kept}", err=True)
        return self.coerce_path_result(str(kept))


TYPES = {Path: click.Path()}
DATA_FILES = ("data", "valid")
METAVARS: dict[Any, str] = {
    int: "INTEGER",
    float: "NUMBER",
    str: "TEXT",
    Path: "PATH",
    DataSource: "PATH=WEIGHT",
}
SHORT = {"objective_options": ("-O",)}
_MODULES = ("targets", "modules_to_save")

S = TypeVar("S", bound=Section)


def options_of(kind: type[Section]) -> list[click.Parameter]:
    """Return the flags of a section, and `--config`."""
    return [*(_option(*item) for item in kind.model_fields.items()), config_option()]


def files_argument() -> click.Argument:
    """FILES, as many as there are; none for those of the settings."""
    return click.Argument(["files"], nargs=-1, type=DataFile(path_type=Path))


def with_files(files: tuple[Path, ...], flags: Mapping[str, Any]) -> dict[str, Any]:
    """`flags` with FILES before what `--data` names.

    Raises:
        ConfigError: C006, a FILE is a second value of `--targets` or `--modules-to-save`.
    """
    for file in files:
        missing = not (file.suffix or str(file) == "-" or file.exists())
        if missing and (option := next((kebab(each) for each in _MODULES if flags.get(each)), "")):
            remedy = f"if it is a second value, repeat the option: --{option} {file}"
            raise ConfigError("C006", f"no data file {file}", where=f"--{option}", remedy=remedy)
    return {**flags, "data": (*files, *flags["data"])}


def config_option() -> click.Option:
    """Return `--config FILE`, which selects the `vox.toml` of the whole command, catalogs and
    blocked plugins included; the command itself gets no argument."""
    return click.Option(
        ["--config", "config_file"],
        metavar="FILE",
        type=click.Path(path_type=Path),
        callback=_read_throughout,
        expose_value=False,
        help=f"Settings file.  [default: {CONFIG_FILE}, if there is one]",
    )


def _read_throughout(ctx: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    if not ctx.resilient_parsing:
        ctx.with_resource(reading(file))


def settings_from(kind: type[S], flags: Mapping[str, Any]) -> S:
    """Build the settings of a section from `flags` as click gives them: None or () where unset."""
    return read_settings(kind, given(flags))


def value_type(field: FieldInfo) -> Any:
    """Return the type of one value of a setting, without `| None` and `tuple[…, ...]`."""
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(arm for arm in get_args(kind) if arm is not type(None))
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def default_text(field: FieldInfo) -> str:
    """Return the default as a user would type it; empty if there is none."""
    default = field.get_default(call_default_factory=True)
    if default is None or default in ((), {}) or default is False:
        return ""
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _option(name: str, field: FieldInfo) -> click.Option:
    """Build the flag of a setting: unset is None; a table becomes a repeatable `NAME=VALUE` flag
    (`--field` for `fields`)."""
    if is_table(field):
        flags = [f"--{name.removesuffix('s').replace('_', '-')}", name, *SHORT.get(name, ())]
        return click.Option(flags, metavar="NAME=VALUE", multiple=True, help=field.description)
    kind, flag = value_type(field), f"--{name.replace('_', '-')}"
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=field.description)
    default = default_text(field)
    return click.Option(
        [flag[1:], flag] if len(name) == 1 else [flag],
        type=_type(name, kind),
        metavar="DURATION" if is_duration(field) else METAVARS.get(kind),
        multiple=get_origin(field.annotation) is tuple,
        help=(field.description or "") + (f"  [default: {default}]" if default else ""),
    )


class Choice(click.Choice[str]):
    """Names in the help and for completion; pydantic checks the value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


def _type(name: str, kind: Any) -> click.ParamType[Any] | None:
    if name in DATA_FILES:
        return DataFile()
    return Choice(get_args(kind)) if get_origin(kind) is Literal else TYPES.get(kind)
