"""`vox data stats`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vox_core.cli.data_flags import SECTIONS, data_options, files_argument, with_files
from vox_core.cli.lazy import Command
from vox_core.cli.options import given, json_option, settings_from, source_of
from vox_core.cli.output import print_columns, print_json, print_table
from vox_core.config import TrainSettings
from vox_core.display import display

if TYPE_CHECKING:
    from vox_core.data.stats.lengths import Lengths
    from vox_core.run.data.stats import Stats, StatsReport, TokenStats

MOST_SHOWN = 8


@click.command(
    "stats",
    cls=Command,
    params=[files_argument(), *data_options(), json_option()],
    sections=SECTIONS,
    epilog="Example: vox data stats train.jsonl --model smollm2-135m",
)
def stats(
    files: tuple[Path, ...], config_file: Path | None, as_json: bool, **flags: Any
) -> StatsReport:
    """What there is in the data: rows, lengths, duplicates, languages, attributes.

    FILES are data files, as --data names them. All rows are counted, whatever is chosen among them;
    tokens are those of the chosen ones. Lengths are in characters, and nothing is tokenised, unless
    a model is named, here or in vox.toml: then in tokens, with what is trained and what each limit
    would cut.
    """
    settings = settings_from(TrainSettings, config_file, with_files(files, flags))
    named = "model" in given(flags) or source_of(TrainSettings, "model", config_file) != "default"
    from vox_core.run.data.stats import stats as count

    with display() as shown:
        report = count(settings, tokenise=named, progress=shown.transfer)
    if as_json:
        print_json(
            {
                "train": report.train.to_json(),
                "valid": report.valid.to_json() if report.valid else None,
            }
        )
        return report
    _show(report.train)
    if report.valid:
        click.echo("\nvalidation")
        _show(report.valid)
    return report


def _show(found: Stats) -> None:
    print_table(_rows(found))
    if found.tokens:
        click.echo()
        print_columns(_truncation(found.tokens))


def _rows(found: Stats) -> Iterator[tuple[str, str]]:
    malformed = f", {found.malformed:,} more cannot be read: vox data check says why"
    yield "rows", f"{found.rows:,}" + (malformed if found.malformed else "")
    if len(found.files) > 1:
        for path, rows in found.files.items():
            yield f"  {path}", f"{rows:,}"
    yield "forms", _mix(found.forms, found.rows)
    if found.tokens:
        tokens = found.tokens
        share = tokens.trained / tokens.tokens if tokens.tokens else 0
        of = f", of the {tokens.rows:,} rows that are chosen; all else here is of all rows"
        chosen = of if tokens.rows != found.rows else ""
        yield "tokens", f"{tokens.lengths.total:,} with {tokens.model}{chosen}"
        yield (
            "  at seq-len",
            f"{tokens.tokens:,} of at most {tokens.seq_len:,} a row, "
            f"{tokens.trained:,} trained ({share:.1%})",
        )
        yield "  a row", _lengths(tokens.lengths)
    yield "characters", f"{found.characters.total:,}"
    yield "  a row", _lengths(found.characters)
    yield "messages", ", ".join(f"{n:,} {role}" for role, n in found.roles.items()) or "none"
    turns = {f"{n} answer{'' if n == 1 else 's'}": rows for n, rows in found.turns.items()}
    yield "turns", _mix(turns, sum(found.turns.values())) or "none"
    yield "duplicates", _duplicates(found)
    yield found.languages_by, f"{_mix(found.languages, found.sample)}, of {found.sample:,} rows"
    for name, values in found.attributes.items():
        yield name, _mix(values, found.rows)


def _mix(counts: Mapping[str, int], of: int) -> str:
    """`chat 80 %, text 20 %`, the most frequent ones."""
    told = [f"{name} {_share(n, of)}" for name, n in [*counts.items()][:MOST_SHOWN]]
    return ", ".join(told + (["…"] if len(counts) > MOST_SHOWN else []))


def _share(n: int, of: int) -> str:
    share = 100 * n / of if of else 0
    return f"{share:.0f} %" if share >= 1 or not n else f"{share:.2g} %"


def _lengths(found: Lengths) -> str:
    told = ", ".join(f"{p} %: {length:,}" for p, length in found.percentiles.items())
    return f"{found.mean:,.0f} in the mean, longest {found.longest:,}; up to {told}"


def _duplicates(found: Stats) -> str:
    twice = found.duplicates
    if not twice.rows:
        return "none"
    named = ", ".join(f"{row} as {first}" for row, first in twice.first)
    more = ", …" if twice.rows > len(twice.first) else ""
    return f"{twice.rows:,} rows repeat one of {twice.repeated:,} ({named}{more})"


def _truncation(tokens: TokenStats) -> Iterator[list[str]]:
    yield ["--seq-len", "rows cut", "", "tokens beyond", ""]
    for each in tokens.truncation:
        yield [
            f"{each.seq_len}{' *' if each.seq_len == tokens.seq_len else ''}",
            f"{each.rows:,}",
            _share(each.rows, tokens.rows),
            f"{each.tokens:,}",
            _share(each.tokens, tokens.lengths.total),
        ]
