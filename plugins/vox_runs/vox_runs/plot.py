"""Plot loss curves of runs as a PNG: training losses and their running mean, validation dots.

matplotlib draws it, an optional requirement: `pip install 'vox-ml-runs[plot]'`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vox_core.api.files import atomic_file, storage_errors
from vox_core.api.runs import Curve, Summary, read_run
from vox_core.errors import ConfigError, OutputError, command

INCHES = (8.0, 5.0)
DPI = 150
_SOFTWARE, _VOX = "Software", "vox runs plot"
_HEAD = 1024


def default_out(runs: Sequence[Path]) -> Path:
    """Return a file in the working folder, named after a single run."""
    return Path(f"{runs[0].resolve().name}-losses.png" if len(runs) == 1 else "losses.png")


def plot(runs: Sequence[Path], out: Path) -> list[Summary]:
    """Write the plot, replacing an earlier one of vox, and return the curves in it.

    Raises:
        AdapterError: A001, one of the folders is no run.
        ConfigError: C002, `out` is no .png; C004, there is no loss yet; C009, no matplotlib.
        OutputError: O001, `out` exists and is no plot of vox.
        StorageError: the plot cannot be written.
    """
    if out.suffix.lower() != ".png":
        raise ConfigError(
            "C002",
            "a picture is written as PNG",
            where="--out",
            found=out,
            expected="a name that ends in .png",
            remedy=command("--out", out.with_suffix(".png")),
        )
    if out.exists() and not _is_ours(out):
        raise OutputError(
            "O001",
            "the picture would overwrite a file that `vox runs plot` did not write",
            where=out,
            remedy="choose another one with --out",
        )
    drawn = [read_run(run) for run in runs]
    if not any(loss is not None for each in drawn for _, loss in each.losses):
        raise ConfigError(
            "C004",
            "there is no loss to draw yet",
            where=", ".join(each.run for each in drawn),
            remedy="wait for the first step: vox runs watch RUN",
        )
    figure = _figure(drawn)
    with atomic_file(out) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={_SOFTWARE: _VOX})
    return drawn


def _is_ours(out: Path) -> bool:
    """Whether PNG's text chunks, which precede the pixels, name vox as the writer."""
    if not out.is_file():  # reading a pipe would never end
        return False
    with storage_errors(out), out.open("rb") as file:
        return f"{_SOFTWARE}\0{_VOX}".encode() in file.read(_HEAD)


def _figure(runs: Sequence[Summary]) -> Any:
    library = _matplotlib()
    # Dollar signs in a folder's name must not start a formula.
    with library.rc_context({"text.parse_math": False}):
        figure = importlib.import_module("matplotlib.figure").Figure(
            figsize=INCHES, layout="constrained"
        )
        axes = figure.add_subplot()
        handles = [
            handle for index, run in enumerate(runs) for handle in _draw(axes, run, f"C{index}")
        ]
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend(handles, [handle.get_gid() for handle in handles])
    return figure


def _draw(axes: Any, run: Summary, colour: str) -> list[Any]:
    """Draw a run; return the lines of the legend, each with its label as gid."""
    name = Path(run.run).name or run.run
    handles = []
    if points := _points(run.losses):
        steps, losses = zip(*points, strict=True)
        axes.plot(steps, losses, color=colour, linewidth=0.8, alpha=0.4)
        (line,) = axes.plot(steps, _smooth(losses), color=colour, gid=name)
        handles.append(line)
    if points := _points(run.held_out):
        steps, losses = zip(*points, strict=True)
        (line,) = axes.plot(steps, losses, "o--", color=colour, gid=f"{name}, held out")
        handles.append(line)
    return handles


def _points(curve: Curve) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in curve if loss is not None]


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return the centred running mean over a twentieth of the curve."""
    reach = max(len(losses) // 40, 0)
    windows = (losses[max(at - reach, 0) : at + reach + 1] for at in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def _matplotlib() -> Any:
    try:
        library = importlib.import_module("matplotlib")
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "C009",
            "drawing a picture needs matplotlib, which is not installed",
            where="vox runs plot",
            found=error,
            remedy="pip install 'vox-ml-runs[plot]', or pip install matplotlib; "
            "vox runs show RUN draws a curve in the terminal",
        ) from error
    return library
