"""`vox backend`: list, explain."""

from __future__ import annotations

from typing import Any, get_args

import click

from vox_core.cli.lazy import Group, json_option
from vox_core.cli.options import config_option, settings_from
from vox_core.cli.output import print_columns, print_json, printable, warn_of_unknown
from vox_core.config import GenerateSettings, MergeSettings, ModelUse, TrainSettings, given
from vox_core.contract import DType, Method, Quant
from vox_core.errors import BackendError
from vox_core.host import TELLS_MORE, Operation, Request, Seen, Verdict

_SETTINGS: dict[Operation, type[TrainSettings] | type[ModelUse]] = {
    "train": TrainSettings,
    "merge": MergeSettings,
    "load": GenerateSettings,
}


@click.group("backend", cls=Group)
def backend() -> None:
    """List installed backends, and explain which one vox chooses."""


@backend.command("list", params=[json_option()])
def list_installed(as_json: bool) -> None:
    """List the installed backends, and whether each works on this machine."""
    verdicts = Seen().verdicts(Request("load"))
    warn_of_unknown()
    if as_json:
        print_json(verdicts)
    elif verdicts:
        _print_verdicts(verdicts)
    else:
        click.echo("no backend is installed; for one on the CPU: vox plugin install cpu", err=True)


def _choice(flag: str, kind: Any, help: str, default: str | None = None) -> click.Option:
    shown = f"{help}  [default: {default}]" if default else help
    return click.Option([flag], type=click.Choice(get_args(kind)), default=default, help=shown)


@backend.command(
    "explain",
    params=[
        _choice("--operation", Operation, "Operation to choose a backend for.", "train"),
        _choice("--quant", Quant, "Quantisation of the base model."),
        _choice("--method", Method, "Kind of adapter."),
        _choice("--dtype", DType, "Compute dtype; any by default."),
        click.Option(["--family"], metavar="TEXT", help="The model's `model_type`, such as llama."),
        click.Option(["--backend"], metavar="TEXT", help="Use this backend only."),
        click.Option(["--allow-cpu"], is_flag=True, default=None, help="As for `vox train`."),
        config_option(),
        json_option(),
    ],
)
def explain_choice(
    operation: Operation,
    quant: Quant | None,
    family: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Explain which backend vox chooses, and why it rejects the others.

    Settings not given here come from vox.toml and the environment, as they would for the operation.
    """
    seen, request = Seen(), _request(operation, quant, family, flags)
    refusal, why = None, ""
    try:
        selection = seen.select(request)
        verdicts, facts = selection.verdicts, selection.to_json()
    except BackendError as error:
        refusal, verdicts = error, seen.verdicts(request)
        why = error.what + (f": {error.found}" if error.found else "")
        facts = {"chosen": None, "why": why, "hardware": None, "verdicts": verdicts}
    warn_of_unknown()
    if as_json:
        print_json(facts)
        return
    if verdicts:
        _print_verdicts(verdicts)
    if refusal:
        click.echo(printable(f"no backend is chosen: {why}"))
        remedy = refusal.remedy.replace(TELLS_MORE, "see `vox plugin doctor`")
        click.echo(printable(f"next: {remedy}"))


def _request(
    operation: Operation,
    quant: Quant | None,
    family: str | None,
    flags: dict[str, Any],
) -> Request:
    """Build the request that the operation would make with these settings."""
    kind = _SETTINGS[operation]
    known = {name: value for name, value in given(flags).items() if name in kind.model_fields}
    settings = settings_from(kind, known)
    merging = operation == "merge"  # its own `dtype` is that of the files
    dtype: Any = flags["dtype"] or (None if merging else getattr(settings, "dtype", None))
    return Request(
        operation=operation,
        quant=quant or ("none" if operation == "train" else None),
        dtype=dtype if dtype in get_args(DType) else None,  # not `auto`
        method=flags["method"] or getattr(settings, "method", None),
        model_type=family,
        explicit=settings.backend,
        allow_cpu=getattr(settings, "allow_cpu", False),
        streamed=merging,
    )


def _print_verdicts(verdicts: tuple[Verdict, ...]) -> None:
    print_columns((each.id, each.version, each.status, each.reason) for each in verdicts)
