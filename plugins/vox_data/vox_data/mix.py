"""`vox data mix`: a recipe and its sources to one file of rows, and the account of every row.

The file is a function of the recipe, the bytes of the sources and the rules that rows are read by;
the report beside it says of which, so that what is up to date is left alone. A file that is there
and is not what an earlier mixture left is not touched without `force`.

The report is put in place before the rows and says what it replaces: whatever a crash leaves is
known for vox's own, and made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vox_core.api.files import (
    atomic_file,
    file_sha256,
    make_folder,
    read_json,
    require_apart,
    write_json,
)
from vox_core.api.rows import (
    CACHE_VERSION,
    CheckedFile,
    Placed,
    apportion,
    check_files,
    find_split,
    listed,
    no_such_value,
)
from vox_core.errors import ConfigError, DataError, OutputError
from vox_data.mix_draw import drawn, largest_rows, mixed, most_rows, permutation
from vox_data.mix_sources import CHOICES, REASONS, Pool, pieces, pool_of, without_duplicates
from vox_data.recipe import MixRecipe, MixSource, read_recipe

FORMAT = 1
_FAULTS_KEPT = 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Counts of a source's rows: taken, repeated, left out.

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


def mix(
    recipe: Path, out: Path, *, force: bool = False, progress: Progress | None = None
) -> MixReport:
    """Make the mixture, if it is not there already.

    Args:
        force: make it even if it is, and whatever is in its place.

    Raises:
        ConfigError: C002, C003, the recipe.
        DataError: D001 to D003, the sources; D021, they have nothing that a filter names; D030,
            they have not got what the weights ask.
        OutputError: O001, what is in the way is no mixture; O002; O004, `out` is read.
        StorageError: it cannot be written.
    """
    asked = read_recipe(recipe)
    paths = [_only_file(source.path) for source in asked.source]
    sources = [("the source", path) for path in paths]
    require_apart(out, [("the recipe", recipe), *sources])
    checked = _checked(asked, paths, progress)
    fingerprint = _fingerprint(asked, [file.origin.sha256 for file in checked])
    there = _Found(out)
    if not force:
        if done := there.up_to_date(fingerprint):
            return done
        there.require_own()
    pools = [pool_of(file, source) for file, source in zip(checked, asked.source, strict=True)]
    _require_known(recipe, asked, pools)
    pools = _reduced(asked, pools)
    counts = _counts(recipe, asked, pools)
    make_folder(out.parent)
    chosen = [
        drawn(len(pool), count, asked.seed, number)
        for number, (pool, count) in enumerate(zip(pools, counts, strict=True))
    ]
    lanes = [source.lane for source in asked.source]
    with atomic_file(out) as file:
        size, sha256 = 0, hashlib.sha256()
        for piece in pieces(pools, lanes, *mixed(chosen, asked.seed)):
            file.write(piece)
            size += len(piece)
            sha256.update(piece)
            if progress:
                progress("mixing", size, 0)
        for each in checked:
            each.require_unchanged()  # else these would be pieces of other rows
        report = MixReport(
            fingerprint=fingerprint,
            output=out.name,
            sha256=sha256.hexdigest(),
            replaces=there.sha256,
            rows=sum(counts),
            bytes=size,
            seed=asked.seed,
            sources=tuple(_of_sources(recipe, asked, pools, counts)),
            faults=tuple(listed(_faults(checked))),
        )
        write_json(report_path(out), to_json(report))
    return report


def _only_file(path: Path) -> Path:
    """The file that a source stands for.

    Raises:
        ConfigError: C002, there are several.
    """
    found, _ = find_split([path])
    if len(found) > 1:
        raise ConfigError(
            "C002",
            "a source of a mixture is one file",
            where=path,
            found=", ".join(file.name for file in found),
            remedy="name each of them as a source of its own",
        )
    return found[0]


def _checked(
    recipe: MixRecipe, paths: Sequence[Path], progress: Progress | None
) -> list[CheckedFile]:
    skip = recipe.malformed_rows == "skip"
    try:
        return check_files(paths, skip=skip, progress=progress)
    except DataError as error:
        if error.code != "VOX-D003":
            raise
        remedy = "correct these rows; convert a file of another format or encoding"
        if not skip:
            remedy += '; or leave malformed rows out: malformed-rows = "skip" in the recipe'
        raise error.but(remedy=remedy) from None  # a mixture has no flags for it


def _faults(checked: Sequence[CheckedFile]) -> list[Placed]:
    """The first faults of the rows that were left out."""
    return [*islice((fault for file in checked for fault in file.faults), _FAULTS_KEPT)]


class _Found:
    """The file at the output path, and the report beside it."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.sha256 = file_sha256(out) if out.is_file() else None
        try:
            report = read_json(report_path(out))
        except (OSError, ValueError):
            report = None
        self._report: dict[str, Any] = report if isinstance(report, dict) else {}

    def up_to_date(self, fingerprint: str) -> MixReport | None:
        """The report of the file at the output path, if its fingerprint is the requested one."""
        kept = self._report
        same = self.sha256 is not None and self.sha256 == kept.get("sha256")
        if not same or kept.get("fingerprint") != fingerprint:
            return None
        try:
            sources = tuple(SourceReport(**one) for one in kept["sources"])
            told = {**kept, "sources": sources, "faults": tuple(kept["faults"]), "fresh": False}
            told.pop("format")
            return MixReport(**told)
        except (KeyError, TypeError):  # somebody has been at it
            return None

    def require_own(self) -> None:
        """Refuse to replace a file that no mixture wrote.

        Raises:
            OutputError: O001.
        """
        ours = (None, self._report.get("sha256"), self._report.get("replaces"))
        if not self._out.exists() or (self.sha256 and self.sha256 in ours):
            return
        raise OutputError(
            "O001",
            "the output file exists, and is not what vox data mix has left there",
            where=self._out,
            found="another file" if not self._report else "a mixture that was changed since",
            remedy="choose another file with --out, or add --force to replace it",
        )


def _fingerprint(recipe: MixRecipe, sha256: Sequence[str]) -> str:
    """Of what decides the rows; the names of files do not."""
    said = recipe.model_dump(mode="json")
    for source, digest in zip(said["source"], sha256, strict=True):
        source["path"] = digest
    decides = {"format": FORMAT, "version": CACHE_VERSION, "recipe": said}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _require_known(where: Path, recipe: MixRecipe, pools: Sequence[Pool]) -> None:
    """Raises:
    DataError: D021, a filter names only what no row of its source has.
    """
    for source, pool in zip(recipe.source, pools, strict=True):
        left = sound = pool.facts.rows
        for reason, name, key in CHOICES:
            if left and pool.reasons[reason] == left:
                of = "" if left == sound else f", of the {left:,} rows that lanes lets through"
                place, wanted = f"{where}, {source.path}{of}", getattr(source, key)
                raise no_such_value(name, key, place, wanted, pool.others[reason])
            left -= pool.reasons[reason]


def _reduced(recipe: MixRecipe, pools: Sequence[Pool]) -> list[Pool]:
    """Return the rows to draw from: each once, at most a source's cap."""
    if recipe.dedup == "exact":
        pools = without_duplicates(pools)
    return [
        _capped(pool, source.cap, recipe.seed, number)
        for number, (pool, source) in enumerate(zip(pools, recipe.source, strict=True))
    ]


def _capped(pool: Pool, cap: int | None, seed: int, number: int) -> Pool:
    """At most `cap` rows: those that are drawn first of all."""
    if cap is None or len(pool) <= cap:
        return pool
    kept_N = np.zeros(len(pool), bool)
    kept_N[permutation(len(pool), seed, number + 1)[:cap]] = True
    return pool.only(kept_N, "over the cap")


def _counts(where: Path, recipe: MixRecipe, pools: Sequence[Pool]) -> list[int]:
    """Compute the number of rows from each source.

    Raises:
        DataError: D030.
    """
    limits = [_limit(source, pool) for source, pool in zip(recipe.source, pools, strict=True)]
    weights = [source.weight for source in recipe.source]
    known = [float(len(pool)) if w is None else w for w, pool in zip(weights, pools, strict=True)]
    empty = [i for i, pool in enumerate(pools) if not len(pool) and weights[i] is not None]
    most = 0 if empty or not any(known) else most_rows(known, limits)
    rows = recipe.rows if recipe.rows is not None else most
    if rows is None:
        raise _short(where, ["every source may repeat its rows without end"], "set rows")
    counts = apportion(rows, known) if any(known) else [0] * len(pools)
    faults = [
        f"{source.path}: {count} rows are asked for, and it has {_has(source, pool)}"
        for source, pool, count, limit in zip(recipe.source, pools, counts, limits, strict=True)
        if (source.weight is not None and not len(pool)) or (limit is not None and count > limit)
    ]
    if weights[0] is None and not faults and rows and most is not None and rows > most:
        faults = [f"{rows} rows are asked for, and all sources together have {most}"]
    if faults or not rows:
        nothing = [
            f"{source.path}: no row is left of {_has(source, pool)}"
            for source, pool in zip(recipe.source, pools, strict=True)
        ]
        raise _short(where, faults or nothing, _way(most and largest_rows(known, limits)))
    return counts


def _limit(source: MixSource, pool: Pool) -> int | None:
    """The most rows that a source can give; None where it may repeat them without end."""
    if source.repeat and len(pool):
        return source.cap
    return len(pool)


def _has(source: MixSource, pool: Pool) -> str:
    left = {reason: n for reason, n in pool.reasons.items() if n}
    beside = ", ".join(f"{n} {reason}" for reason, n in left.items())
    capped = f", cap = {source.cap}" if source.repeat and source.cap else ""
    return f"{len(pool)}" + (f" (of {pool.rows}; {beside})" if beside else "") + capped


def _way(most: int | None) -> str:
    if not most:
        return "look at the filters of such a source (vox data stats shows what its rows have)"
    return (
        f"rows = {most} would fit at these weights; or give such a source a smaller weight, or "
        "repeat = true"
    )


def _short(where: Path, faults: Sequence[str], remedy: str) -> DataError:
    return DataError(
        "D030",
        "the sources have not got the rows that the mixture asks for",
        where=where,
        faults=faults,
        remedy=remedy,
    )


def _of_sources(
    recipe: Path, asked: MixRecipe, pools: Sequence[Pool], counts: Sequence[int]
) -> Iterator[SourceReport]:
    weights, rows = [source.weight or 0.0 for source in asked.source], sum(counts)
    for source, pool, count in zip(asked.source, pools, counts, strict=True):
        taken = min(count, len(pool))
        left = {**pool.reasons, "not drawn": len(pool) - taken}
        yield SourceReport(
            path=_as_said(source.path, recipe.parent),
            sha256=pool.file.origin.sha256,
            rows=pool.rows,
            taken=taken,
            repeated=count - taken,
            left_out={reason: left[reason] for reason in REASONS if left.get(reason)},
            weight=source.weight,
            asked=None if source.weight is None else source.weight / sum(weights),
            share=count / rows,
            lane=source.lane,
        )


def _as_said(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
