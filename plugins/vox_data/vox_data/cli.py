"""`vox data check`, `stats`, `preview`, `mix` and `generate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from vox_core.api.commands import (
    Command,
    counted,
    describe,
    files_argument,
    given,
    json_option,
    options_of,
    print_columns,
    print_json,
    print_table,
    printable,
    settings_from,
    with_files,
)
from vox_core.api.progress import display
from vox_core.api.settings import DataSettings, TrainSettings
from vox_core.errors import command

if TYPE_CHECKING:
    from vox_core.errors import VoxError
    from vox_data.check import CheckReport, FileReport
    from vox_data.mix import MixReport, SourceReport
    from vox_data.preview import PreviewReport
    from vox_data.stats import Lengths, Spread, Stats, StatsReport, TokenStats
    from vox_data.token_view import TokenView

FAULTY = 2
MOST_SHOWN = 8
_NOT_TRAINED = {"preference": "preference (checked, and not trained)"}
_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}

_OF_ROWS = ("data", "valid", "model", "revision", "template", "seq_len")
_SECTIONS: dict[str, tuple[str, ...]] = {
    "Data": (*_OF_ROWS, *DataSettings.model_fields),
    "Objective": ("objective", "objective_options"),
}
"""Heading in help -> flags of `vox train` that matter for rows."""


def _options(*more: str) -> list[click.Parameter]:
    wanted = {*more, "config_file", *(name for names in _SECTIONS.values() for name in names)}
    return [option for option in options_of(TrainSettings) if option.name in wanted]


# --- vox data check -------------------------------------------------------------------------------


@click.command(
    "check",
    cls=Command,
    params=[files_argument(), *_options("reward"), json_option()],
    sections={**_SECTIONS, "Objective": (*_SECTIONS["Objective"], "reward")},
    epilog="Example: vox data check train.jsonl",
)
@click.pass_context
def check(
    ctx: click.Context,
    /,
    files: tuple[Path, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """List every fault of data files, and summarise their rows.

    FILES are data files, as for --data. All rows are checked, also those that the data filters
    leave out. With --objective, rows that the objective cannot use are errors, and with a --reward
    that reads it, rows without an answer; the file of a --reward is run to find its function. Needs
    no model. With --model or --template, every row is rendered with the chat template as for
    training, and the masks of the filtered rows are audited. Exit code 2 if there is an error.
    """
    settings = settings_from(TrainSettings, with_files(files, flags))
    on_the_line = given(flags).keys()  # a vox.toml from elsewhere names no code to run
    from vox_data.check import check as check_data

    with display() as shown:
        report = check_data(
            settings,
            with_model=not on_the_line.isdisjoint(("model", "template")),
            with_reward="reward" in on_the_line,
            progress=shown.transfer,
            observe=shown.observe,
        )
    if as_json:
        print_json({**report.to_json(), "error": describe(report.error) if report.error else None})
    else:
        _show_check(report)
    if report.error:
        _end_with(report.error)
    if not report.sound:
        ctx.exit(FAULTY)
    if not as_json:
        click.echo("no problems found")
        step = ("next:", report.choice, _train_command(ctx, report.lacks))
        click.echo(printable(" ".join(filter(None, step))))


def _end_with(error: VoxError) -> NoReturn:
    """Print an error and exit, where the JSON output has it already."""
    click.echo(printable(error, lines=True), err=True)
    raise click.exceptions.Exit(error.exit_code)


def _train_command(ctx: click.Context, more: Mapping[str, str]) -> str:
    """`vox train` with the files and flags of this command, and `more`."""
    words, left = ["vox", "train"], {**ctx.params, **more}
    for param in ctx.command.params:
        value = left.pop(param.name or "", None)
        values = value if isinstance(value, tuple) else () if value in (None, False) else (value,)
        for each in values:
            words += [param.opts[0]] if isinstance(param, click.Option) else []
            words += [str(each)] if each is not True else []
    for name, value in left.items():
        words += [f"--{name}", value]
    return command(*words)


def _show_check(report: CheckReport) -> None:
    for file in report.files:
        click.echo(printable(_file(file, {} if report.compares else _NOT_TRAINED)))
        if file.unused:
            names = ", ".join(f"{name} ({rows})" for name, rows in file.unused.items())
            click.echo(printable(f"  not used: {names}"))
    if report.template:
        click.echo(printable(f"every row rendered as for {report.template}"))
    for note in report.notes:
        click.echo(printable(f"- {note}"))
    for side, audit in report.audits.items():
        click.echo(f"masks of the {side} rows: {audit}")
        for finding in (*audit.of_level("error"), *audit.of_level("warning")):
            click.echo(printable(f"- {finding.kind.level}: {finding}", lines=True))
    if not (faults := report.faults).total:
        return
    click.echo(f"\n{counted(faults.total, 'error')}, by kind:")
    for kind, count in faults.kinds.most_common():
        click.echo(printable(f"{count:>9,}  {kind}"))
    click.echo(f"\nthe first {len(faults.first)}:" if len(faults.first) > 1 else "\nthe first:")
    for fault in faults.first:
        click.echo(printable(f"- {fault}"))
    click.echo(f"next: {report.next}")


def _file(file: FileReport, names: Mapping[str, str]) -> str:
    named = ((names.get(form, form), rows) for form, rows in file.forms.most_common())
    forms = ", ".join(f"{rows:,} {form}" for form, rows in named) or "no rows"
    wrong = f"; {counted(file.faulty, 'row')} with errors" if file.faulty else ""
    side = "" if file.side == "train" else f" ({file.side})"
    return f"{file.name}{side}: {forms}{wrong}"


# --- vox data stats -------------------------------------------------------------------------------


@click.command(
    "stats",
    cls=Command,
    params=[files_argument(), *_options(), json_option()],
    sections=_SECTIONS,
    epilog="Example: vox data stats train.jsonl --model smollm2-135m",
)
def stats(files: tuple[Path, ...], as_json: bool, **flags: Any) -> StatsReport:
    """Count rows, lengths, duplicates, languages and attributes of data files.

    FILES are data files, as for --data. All rows are counted, also those that the data filters
    leave out. Lengths are in characters. With a model, from --model or vox.toml, the filtered rows
    are tokenised too: tokens, trained tokens, and the tokens that each --seq-len would cut.
    """
    settings = settings_from(TrainSettings, with_files(files, flags))
    named = "model" in settings.model_fields_set
    from vox_data.stats import stats as count

    with display() as shown:
        report = count(settings, tokenise=named, progress=shown.transfer, observe=shown.observe)
    if as_json:
        print_json(report)
        return report
    _show_stats(report.train)
    if report.valid:
        click.echo("\nvalidation")
        _show_stats(report.valid)
    return report


def _show_stats(found: Stats) -> None:
    print_table(_stats_rows(found))
    if found.tokens:
        click.echo()
        print_columns(_truncation(found.tokens))


def _stats_rows(found: Stats) -> Iterator[tuple[str, str]]:
    malformed = f", {found.malformed:,} more cannot be read: vox data check says why"
    yield "rows", f"{found.rows:,}" + (malformed if found.malformed else "")
    if len(found.files) > 1:
        for path, rows in found.files.items():
            yield f"  {path}", f"{rows:,}"
    yield "formats", _shares(found.forms, found.rows)
    if found.tokens:
        tokens = found.tokens
        share = tokens.trained / tokens.tokens if tokens.tokens else 0
        of_them = f"{tokens.trained:,} trained ({share:.1%})"
        if tokens.prompts:
            of_them = f"{counted(tokens.prompts, 'prompt')}, which the model answers"
        of = f", in {counted(tokens.rows, 'filtered row')}; the other lines cover all rows"
        chosen = of if tokens.rows != found.rows else ""
        yield "tokens", f"{tokens.lengths.total:,} with {tokens.model}{chosen}"
        yield (
            "  at seq-len",
            f"{tokens.tokens:,}, at most {tokens.seq_len:,} per {_unit(tokens)}; {of_them}",
        )
        yield f"  per {_unit(tokens)}", _lengths(tokens.lengths)
    yield "characters", f"{found.characters.total:,}"
    yield "  per row", _lengths(found.characters)
    yield "messages", ", ".join(f"{n:,} {role}" for role, n in found.roles.items()) or "none"
    turns = {counted(n, "answer"): rows for n, rows in found.turns.items()}
    yield "turns", _shares(turns, sum(found.turns.values())) or "none"
    yield "duplicates", _duplicates(found)
    of = counted(found.sample, "row")
    yield "languages", f"{_shares(found.languages, found.sample)}, of {of}"
    for name, values in found.attributes.items():
        numbers = found.numbers.get(name) if len(values) > MOST_SHOWN else None
        yield name, _spread(numbers, found.rows) if numbers else _shares(values, found.rows)


def _shares(counts: Mapping[str, int], of: int) -> str:
    """`chat 80 %, text 20 %`, the most frequent ones."""
    told = [f"{name} {_share(n, of)}" for name, n in [*counts.items()][:MOST_SHOWN]]
    return ", ".join(told + (["…"] if len(counts) > MOST_SHOWN else []))


def _share(n: int, of: int) -> str:
    share = 100 * n / of if of else 0
    return f"{share:.0f} %" if share >= 1 or not n else f"{share:.2g} %"


def _lengths(found: Lengths) -> str:
    told = ", ".join(f"p{p} {length:,}" for p, length in found.percentiles.items())
    return f"mean {found.mean:,.0f}, max {found.longest:,}, {told}"


def _spread(found: Spread, of: int) -> str:
    ends = f"min {found.smallest:.4g}, max {found.largest:.4g}"
    told = ", ".join(f"p{p} {value:.4g}" for p, value in found.percentiles.items())
    some = f", in {_share(found.rows, of)} of the rows" if found.rows < of else ""
    return f"mean {found.mean:.4g}, {ends}, {told}{some}"


def _duplicates(found: Stats) -> str:
    twice = found.duplicates
    if not twice.rows:
        return "none"
    named = ", ".join(f"{row} as {first}" for row, first in twice.first)
    more = ", …" if twice.rows > len(twice.first) else ""
    of = counted(twice.repeated, "row")
    return f"{counted(twice.rows, 'repetition')} of {of} ({named}{more})"


def _unit(tokens: TokenStats) -> str:
    return "example" if tokens.documents > tokens.rows else "row"


def _truncation(tokens: TokenStats) -> Iterator[list[str]]:
    done, lost = ("dropped", "tokens in them") if tokens.prompts else ("cut", "tokens beyond")
    yield ["--seq-len", f"{_unit(tokens)}s {done}", "", lost, ""]
    for each in tokens.truncation:
        yield [
            f"{each.seq_len}{' *' if each.seq_len == tokens.seq_len else ''}",
            f"{each.rows:,}",
            _share(each.rows, tokens.documents),
            f"{each.tokens:,}",
            _share(each.tokens, tokens.lengths.total),
        ]


# --- vox data preview -----------------------------------------------------------------------------


@click.command(
    "preview",
    cls=Command,
    params=[
        files_argument(),
        *_options(),
        click.Option(["-n", "number"], type=click.IntRange(1), default=5, help="Rows to show."),
        click.Option(
            ["--row", "places"],
            metavar="[FILE:]LINE",
            multiple=True,
            help="Show this row instead. FILE: may be omitted for a single file. Repeatable.",
        ),
        click.Option(
            ["--seed"], type=click.IntRange(0), default=0, help="Seed of the rows.  [default: 0]"
        ),
        click.Option(["--weights"], is_flag=True, help="Show the weights of trained tokens."),
        click.Option(
            ["--audit", "whole"], is_flag=True, help="Audit all rows, not only those shown."
        ),
        click.Option(
            ["--html"],
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Write a self-contained HTML page instead.",
        ),
        json_option(),
    ],
    sections=_SECTIONS,
    epilog="Example: vox data preview train.jsonl --model smollm2-135m -n 3",
)
def preview(
    files: tuple[Path, ...],
    as_json: bool,
    number: int,
    places: tuple[str, ...],
    seed: int,
    weights: bool,
    whole: bool,
    html: Path | None,
    **flags: Any,
) -> PreviewReport:
    """Show rows as the chat template renders them, with the trained text marked.

    FILES are data files, as for --data. The rows are spread over the data. Trained text is green,
    or in ⟦brackets⟧ without colours; special tokens are shown. The findings of the mask audit
    follow.
    """
    settings = settings_from(TrainSettings, with_files(files, flags))
    from vox_data.preview import preview as look

    with display() as shown:
        report = look(
            settings,
            number=number,
            seed=seed,
            places=places,
            whole=whole,
            html=html,
            progress=shown.transfer,
            observe=shown.observe,
        )
    if as_json:
        print_json({**report.to_json(), "error": describe(report.error) if report.error else None})
    else:
        _show_preview(report, weights)
    if report.error:
        _end_with(report.error)
    return report


def _show_preview(report: PreviewReport, weights: bool) -> None:
    colour = _colourful()
    if report.html is None:
        for row in report.shown:
            click.echo(_heading(row), color=colour)
            click.echo(_body(row, colour, weights), color=colour)
            click.echo()
    facts = {label: text for label, text in report.facts().items() if label != "error"}
    print_table(facts | ({"page": str(report.html)} if report.html else {}))
    for finding in report.findings:
        said = finding.kind.level
        level = click.style(said, fg=_COLOURS[said]) if colour else said
        click.echo(f"{level}: {printable(finding, lines=True)}", color=colour)


def _colourful() -> bool:
    """Whether stdout is a terminal whose user wants colours (no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _heading(row: TokenView) -> str:
    told = [f"{row.file}:{row.line}", row.form, f"{len(row.ids):,} tokens"]
    told += [f"{row.trained:,} trained"]
    told += [f"cut: {row.cut}"] if row.cut != "none" else []
    told += [f"dropped: {row.dropped}"] if row.dropped else []
    return printable(f"── {', '.join([*told, *row.findings])} ──")


def _body(row: TokenView, colour: bool, weights: bool) -> str:
    if row.fault is not None:
        return f"cannot be rendered: {printable(row.fault, lines=True)}"
    special = set(row.special)
    tokens = enumerate(row.tokens[: row.kept])
    runs = groupby(
        tokens, key=lambda token: (row.weights[token[0]], token[0] in special and colour)
    )
    text = "".join(
        _run("".join(text for _, text in run), weight, named, colour, weights)
        for (weight, named), run in runs
    )
    lost = len(row.ids) - row.kept
    return text + (f"\n… {lost:,} more tokens, cut away" if lost else "")


def _run(text: str, weight: float, special: bool, colour: bool, weights: bool) -> str:
    """Tokens of one weight."""
    text = printable(text, lines=True)
    told = f"{{{weight:g}}}" if weight and weights else ""
    if not colour:
        return f"⟦{text}⟧{told}" if weight else text
    style: dict[str, Any] = {"fg": "black", "bg": "green"} if weight else {}
    style |= {"bold": True} if special else {}
    style |= {"fg": "magenta"} if special and not weight else {}
    return "\n".join(_styled(line, style) for line in text.split("\n")) + told


def _styled(line: str, style: dict[str, Any]) -> str:
    """Style one line by itself, so that its background ends with it."""
    return click.style(line, **style) if line and style else line


# --- vox data mix ---------------------------------------------------------------------------------


@click.command(
    "mix",
    cls=Command,
    params=[
        click.Argument(["recipe"], metavar="MIX.TOML", type=click.Path(path_type=Path)),
        click.Option(
            ["--out"],
            metavar="FILE",
            type=click.Path(path_type=Path),
            required=True,
            help="JSONL file to write; the report is written next to it, as FILE.mix.json.",
        ),
        click.Option(["--force"], is_flag=True, help="Overwrite any existing file."),
        json_option(),
    ],
    epilog="Example: vox data mix mix.toml --out train.jsonl",
)
def mix(recipe: Path, out: Path, force: bool, as_json: bool) -> MixReport:
    """Mix rows of several files into one, in the proportions of MIX.TOML.

    The same recipe and the same files give the same bytes. An up-to-date mixture is not rebuilt.
    """
    from vox_data.mix import mix as make_mixture

    with display() as shown:
        report = make_mixture(recipe, out, force=force, progress=shown.transfer)
    if as_json:
        print_json(report)
    else:
        _show_mix(report, out)
    return report


def _show_mix(report: MixReport, out: Path) -> None:
    head = ("source", "rows", "taken", "requested", "share", "left out")
    print_columns([head, *_mix_rows(report)])
    done = "written" if report.fresh else "up to date, nothing written"
    rows = counted(report.rows, "row")
    print_table(
        {
            "mixture": f"{out}: {rows}, {report.bytes / 1e6:,.1f} MB; {done}",
            "fingerprint": report.fingerprint,
        }
    )
    for fault in report.faults:
        click.echo(printable(f"left out: {fault}"), err=True)


def _mix_rows(report: MixReport) -> Iterator[tuple[str, ...]]:
    for source in report.sources:
        yield (
            source.path,
            f"{source.rows:,}",
            _taken(source),
            "" if source.asked is None else f"{source.asked:.2%}",
            f"{source.share:.2%}",
            ", ".join(f"{count:,} {reason}" for reason, count in source.left_out.items()),
        )


def _taken(source: SourceReport) -> str:
    return f"{source.taken:,}" + (f" + {source.repeated:,} again" if source.repeated else "")


# --- vox data generate ----------------------------------------------------------------------------


@click.command(
    "generate",
    cls=Command,
    params=[
        click.Option(
            ["--from", "teacher"],
            required=True,
            metavar="RUN|MODEL|URL",
            help="Teacher: a run, a model, or the address of an OpenAI-compatible server.",
        ),
        click.Option(
            ["--recipe", "recipe_file"],
            required=True,
            type=click.Path(path_type=Path),
            help="Recipe file (TOML): prompts, sampling, checks.",
        ),
        click.Option(
            ["--out"], required=True, type=click.Path(path_type=Path), help="Output folder."
        ),
        click.Option(["--backend"], help="Use this backend only."),
        click.Option(
            ["--dtype"],
            type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
            default="auto",
            help="Compute dtype.",
        ),
        json_option(),
    ],
    epilog="Example: vox data generate --from runs/teacher --recipe recipe.toml --out made",
)
def generate(
    teacher: str, recipe_file: Path, out: Path, backend: str | None, dtype: Any, as_json: bool
) -> None:
    """Generate rows: a teacher answers a recipe's prompts; answers that pass its checks are kept.

    The rows are written to train.jsonl in the output folder. Repeating the command continues an
    interrupted generation.
    """
    from vox_data.generate import generate as generate_rows

    with display() as shown:
        made = generate_rows(
            teacher,
            recipe_file,
            out,
            backend=backend,
            dtype=dtype,
            observe=shown.observe,
            progress=shown.transfer,
        )
    if as_json:
        print_json(
            {"folder": made.folder, "prompts": made.prompts, "kept": made.kept}
            | {"rejected": dict(made.rejected)}
        )
        return
    click.echo(f"{made.kept} of {counted(made.prompts, 'row')} kept")
    for reason, count in made.rejected.items():
        click.echo(printable(f"{count:>9,}  {reason}"))
    click.echo(printable(f"next: {command('vox', 'train', '--data', out / 'train.jsonl')}"))
