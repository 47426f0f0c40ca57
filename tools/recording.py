"""A terminal session as a picture for the README, from a real recording.

    script -qc "vox quickstart" typescript
    python tools/recording.py typescript docs/quickstart.svg

The recording is played into a terminal emulator (`pip install pyte`), so that what stands in the
picture is what stood on the screen at the end; lines are neither added nor reworded, only the ones
that `--lines A:B` leaves out are missing. Needs `rich`, which vox has, for the drawing.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 104, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("typescript", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lines", default=":", help="slice of the lines to show")
    arguments = parser.parse_args()
    first, _, last = arguments.lines.partition(":")
    lines = screen(arguments.typescript)[int(first or 0) : int(last) if last else None]
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in lines:
        console.print(line, no_wrap=True)
    console.save_svg(str(arguments.out), title="vox quickstart", code_format=without_web_fonts())


def without_web_fonts() -> str:
    """rich's picture, without the addresses of fonts on the web."""
    return re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def screen(typescript: Path) -> list[Text]:
    """The lines on the screen at the end, with their colours."""
    terminal = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(terminal)
    recorded = typescript.read_bytes().splitlines(keepends=True)
    stream.feed(b"".join(line for line in recorded if not line.startswith(b"Script ")))
    lines = [_line(terminal.buffer[row]) for row in range(ROWS)]
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _line(cells: dict[int, pyte.screens.Char]) -> Text:
    text = Text()
    for column in range(COLUMNS):
        cell = cells[column]
        plain = cell.fg == "default" and not cell.bold
        text.append(cell.data, None if plain else Style(bold=cell.bold, color=_colour(cell.fg)))
    text.rstrip()
    return text


def _colour(name: str) -> str | None:
    """pyte's name of a colour in rich's words: a name, or six hexadecimal digits."""
    if name == "default":
        return None
    return (
        f"#{name}"
        if _is_hex(name)
        else re.sub("^bright", "bright_", name.replace("brown", "yellow"))
    )


def _is_hex(name: str) -> bool:
    return len(name) == 6 and not set(name) - set("0123456789abcdef")


if __name__ == "__main__":
    main()
