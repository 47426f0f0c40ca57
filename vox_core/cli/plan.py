"""`vox plan`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.data_flags import files_argument, with_files
from vox_core.cli.lazy import Command
from vox_core.cli.options import backend_origin, json_option, options_of, settings_from
from vox_core.cli.output import print_json
from vox_core.cli.train import SECTIONS as TRAIN_SECTIONS
from vox_core.config import TrainSettings
from vox_core.display import display

if TYPE_CHECKING:
    from vox_core.run.planning import PlanReport

PRESETS = "presets"
PRESET_SIZES = tuple(size * 10**9 for size in (8, 16, 24, 48, 80))
SECTIONS = {
    **{
        title: tuple(name for name in names if name != "plan_file")
        for title, names in TRAIN_SECTIONS.items()
    },
    "Plan": ("memory", "measure"),
}

_UNITS = {"": 10**9, "mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def _sizes(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> list[int]:
    """The sizes in bytes, in the order in which they were given."""
    sizes: list[int] = []
    for text in given:
        sizes += PRESET_SIZES if text == PRESETS else [_size(text)]
    return list(dict.fromkeys(sizes))


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(found[2]) if found else None
    if found is None or unit is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is not a size such as 24GB, 512MB or 24GiB")
    return round(float(found[1]) * unit)


def _memory_option() -> click.Option:
    return click.Option(
        ["--memory"],
        metavar="SIZE",
        multiple=True,
        callback=_sizes,
        help="Suggest settings for a device with so much memory, such as 24GB, in place of the one "
        f"that is here; `{PRESETS}`: 8, 16, 24, 48 and 80 GB. Repeatable.",
    )


def _measure_option() -> click.Option:
    return click.Option(
        ["--measure"],
        is_flag=True,
        help="Take some steps of the run, which are not kept, to see how long all would take.",
    )


@click.command(
    "plan",
    cls=Command,
    params=[
        files_argument(),
        *options_of(TrainSettings),
        _memory_option(),
        _measure_option(),
        json_option(),
    ],
    sections=SECTIONS,
    epilog="Example: vox plan train.jsonl --model smollm2-135m --memory presets",
)
def plan(
    files: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    memory: list[int],
    measure: bool,
    **flags: Any,
) -> PlanReport:
    """What train would do, and what that would take.

    Takes the settings of `vox train`, from the same places, and stops where it would begin. FILES
    are data files, as --data names them; without data, documents of --seq-len tokens are assumed.
    Writes nothing; a model that is not on this machine is fetched, as train would. `vox train
    --plan FILE` runs exactly what --json has printed into FILE.
    """
    flags = with_files(files, flags)
    settings = settings_from(TrainSettings, config_file, flags)
    from vox_core.cli.plan_shown import show
    from vox_core.contract import Notice
    from vox_core.run.planning import plan as make_plan

    with display() as shown:
        report = make_plan(
            settings,
            memory=memory,
            to_be_run=as_json,
            measured=measure,
            backend_origin=backend_origin(TrainSettings, config_file, flags),
            progress=shown.transfer,
            tell=lambda text: shown.observe(Notice(text)),
        )
    if as_json:
        print_json(report)
    else:
        show(report)
    return report
