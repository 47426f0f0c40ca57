"""Print results on stdout: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass

import click

from vox_core.text import (
    CONTROLS,
    counted as counted,
    duration as duration,
    losses as losses,
    megabytes as megabytes,
    named as named,
    printable as printable,
    silence as silence,
)


def print_json(result: object) -> None:
    """Print one JSON document on one line; dataclasses become objects, paths text."""
    text = json.dumps(result, ensure_ascii=False, default=_plain)
    click.echo(CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def print_table(rows: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
    """Print label and text per line, texts aligned; a repeated label is printed once."""
    pairs = [*(rows.items() if isinstance(rows, Mapping) else rows)]
    width = max(len(label) for label, _ in pairs) + 2
    before = None
    for label, text in pairs:
        shown = "" if label == before else printable(label)
        click.echo(f"{shown:<{width}}{printable(text, lines=True)}")
        before = label


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells, each column as wide as its widest cell."""
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def warn_of_unknown() -> None:
    """Warn on stderr about ids in `[plugin] blocked` that neither an installed plugin nor the
    catalog has."""
    from vox_core.host.blocked import unknown_blocked
    from vox_core.host.discover import discover

    for line in unknown_blocked([plugin.id for plugin in discover()]):
        warn(line)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    say(printable(f"warning: {text}"))


def say(text: object) -> None:
    """Print on stderr, without control characters, as long as somebody reads it."""
    try:
        click.echo(printable(text, lines=True), err=True)
    except OSError:
        silence(sys.stderr)
