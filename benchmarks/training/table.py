"""Rows of results as text, for a terminal and for a page. Pure; works on the JSON of result.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = (
    "trainer",
    "tokens/s",
    "ms/step",
    "vox speedup",
    "wall time",
    "peak memory",
    "of peak",
    "loss error",
)

Json = Mapping[str, Any]


def cells_of(row: Json) -> list[str]:
    """Format a row under HEADINGS; a void one has its reason instead of numbers."""
    if row["void"]:
        return [row["trainer"], f"void: {row['void']}"]
    return [
        row["trainer"],
        f"{row['tokens_per_second']['median']:,.0f}",
        f"{row['step_milliseconds']:,.1f}",
        _ahead(row["ahead"]),
        f"{row['to_adapter']:,.1f} s",
        _memory(row["memory"]),
        f"{100 * row['utilisation']:.1f} %",
        f"{row['worst_loss']:.0e}",
    ]


def terminal(rows: Sequence[Json]) -> str:
    """Columns padded with spaces."""
    lines = [list(HEADINGS), *map(cells_of, rows)]
    whole = [line for line in lines if len(line) == len(HEADINGS)]
    widths = [max(len(line[i]) for line in whole) for i in range(len(HEADINGS))]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join(_line(line, widths) for line in lines)


def markdown(rows: Sequence[Json]) -> str:
    """A table for a page; a void row's reason stands in its second column."""
    blank = [""] * len(HEADINGS)
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *map(cells_of, rows)]
    return "\n".join(f"| {' | '.join((line + blank)[: len(HEADINGS)])} |" for line in lines)


def notes(rows: Sequence[Json]) -> str:
    """List each trainer's attention and layout of documents in rows."""
    told = [f"{r['trainer']}: {r['attention']}, {r['layout']}" for r in rows if r["attention"]]
    return f"Attention and layout: {'; '.join(told)}." if told else ""


def _line(line: Sequence[str], widths: Sequence[int]) -> str:
    if len(line) < len(widths):
        return f"{line[0].ljust(widths[0])}  {line[1]}"
    first, *rest = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
    return "  ".join([first.strip().ljust(widths[0]), *rest])


def _ahead(ahead: Json | None) -> str:
    if ahead is None:
        return "-"
    return f"{ahead['median']:.2f} ({ahead['low']:.2f} to {ahead['high']:.2f})"


def _memory(memory: Json) -> str:
    """That of the GPU, with what torch reserved of it, or else of the process."""
    if "allocated" not in memory:
        return f"{memory['rss'] / 1e9:.2f} GB"
    return f"{memory['allocated'] / 1e9:.2f} GB, {memory['reserved'] / 1e9:.2f} reserved"
