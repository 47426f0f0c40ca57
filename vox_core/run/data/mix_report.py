"""The report of a mixture: what became of the rows of each source, as it stands beside the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What became of the rows of one source.

    Args:
        path: as the recipe has it.
        rows: in the file; `taken` of them are in the mixture, and each other one is counted under
            a reason.
        left_out: reason -> rows.
        repeated: rows of the mixture beside those taken, which are repetitions.
        asked, share: of the mixture's rows; `asked` is None without weights.
    """

    path: str
    sha256: str
    rows: int
    taken: int
    repeated: int
    left_out: Mapping[str, int]
    weight: float | None
    asked: float | None
    share: float
    lane: str | None


@dataclass(frozen=True, slots=True)
class MixReport:
    """A mixture, as it stands in the report beside it.

    Args:
        fingerprint: of everything that decides the rows: recipe, bytes of the sources, rules.
        output: its name.
        sha256: of the output.
        replaces: SHA-256 of what was there before; None if nothing was.
        faults: of the rows left out as faulty, the first 20.
        fresh: it was made now; False: it was up to date, and nothing was written.
    """

    fingerprint: str
    output: str
    sha256: str
    replaces: str | None
    rows: int
    bytes: int
    seed: int
    sources: tuple[SourceReport, ...]
    faults: tuple[str, ...]
    fresh: bool = True


def report_path(out: Path) -> Path:
    """`train.mix.json` beside `train.jsonl`."""
    return out.with_suffix(".mix.json")


def to_json(report: MixReport) -> dict[str, Any]:
    """Without whether it was made now."""
    told = {"format": FORMAT, **asdict(report)}
    del told["fresh"]
    return told
