"""What is found of the masks of a data set: from counts that were made with its tokens.

Nothing is rendered or tokenised here, so an audit costs nothing beside opening the data set; only
where a token is outside the vocabulary are the tokens read again, to name its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vox_core.data.audit.findings import FEW_TRAINED, FINDINGS, Level
from vox_core.data.dataset import Dataset
from vox_core.data.observed import NAMED, Observed
from vox_core.errors import DataError


@dataclass(frozen=True, slots=True)
class Finding:
    """Something found of a data set.

    Args:
        id: key of `FINDINGS`.
        rows: how many rows; None where it is about the model or all rows together.
        looked_at: rows that were looked at, where that is not all of them.
        places: the first few rows, as `FILE:LINE`.
        detail: more words about the first of them.
    """

    id: str
    level: Level
    what: str
    remedy: str
    rows: int | None = None
    looked_at: int | None = None
    places: tuple[str, ...] = ()
    detail: str = ""

    @classmethod
    def of(cls, id: str, **rest: Any) -> Finding:
        kind = FINDINGS[id]
        return cls(id, kind.level, kind.what, kind.remedy, **rest)

    def __str__(self) -> str:
        told = self.what
        if self.rows is not None:
            of = "" if self.looked_at is None else f" of {self.looked_at:,} looked at"
            told = f"{self.rows:,} {'row' if self.rows == 1 else 'rows'}{of}: {told}"
        more = ", …" if self.rows is not None and self.rows > len(self.places) else ""
        where = f" ({', '.join(self.places)}{more})" if self.places else ""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{told}{where}{detail}; {self.remedy} [{self.id}]"


@dataclass(frozen=True, slots=True)
class Audit:
    """What is found of one data set.

    Args:
        rows: of the files.
        ended: rows with an end-of-turn token that is trained.
    """

    rows: int
    tokens: int
    trained_tokens: int
    ended: int
    findings: tuple[Finding, ...] = field(default=())

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens, {self.trained_tokens:,} trained ({self.trained_share:.1%}); "
            f"{self.ended:,} rows end with a trained end-of-turn token"
        )

    def of_level(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == level]

    def to_json(self) -> dict[str, Any]:
        return {
            "trained_share": round(self.trained_share, 6),
            "rows_with_trained_end": self.ended,
            "rows_without_trained_end": self.rows - self.ended,
            "findings": [_finding_json(finding) for finding in self.findings],
        }


def audit(dataset: Dataset, sources: Sequence[Path], vocabulary: int | None) -> Audit:
    """Audit a data set.

    Args:
        sources: its files, in order.
        vocabulary: ids that the model has embeddings for; None if it does not say.
    """
    findings = sorted(_findings(dataset, sources, vocabulary), key=_order)
    observed = dataset.observed
    return Audit(
        dataset.rows, dataset.tokens, dataset.trained_tokens, observed.ended, tuple(findings)
    )


def require_sound(audits: Mapping[str, Audit]) -> None:
    """Refuse what must not be trained.

    Args:
        audits: by what the rows are for.

    Raises:
        DataError: D050, with every error that was found.
    """
    errors = [(what, error) for what, each in audits.items() for error in each.of_level("error")]
    if not errors:
        return
    first = errors[0][1]
    raise DataError(
        "D050",
        "the masks of the data are wrong",
        where=first.places[0] if first.places else f"the {errors[0][0]} rows",
        found=first.what,
        expected="tokens of the model's vocabulary, and nothing trained but answers",
        faults=[f"{what} rows: {error}" for what, error in errors],
        remedy=first.remedy,
    )


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """How many ids the model of a config.json has embeddings for."""
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, Mapping) else None
        if isinstance(size, int) and size > 0:
            return size
    return None


def row_findings(observed: Observed) -> list[str]:
    """Ids of what is found of single rows, the worst first."""
    return sorted(observed.noted, key=[*FINDINGS].index)


def _findings(
    dataset: Dataset, sources: Sequence[Path], vocabulary: int | None
) -> Iterator[Finding]:
    observed = dataset.observed
    if vocabulary is not None and observed.largest >= vocabulary:
        yield _outside(dataset, vocabulary)
    for name, noted in observed.noted.items():
        yield Finding.of(
            name,
            rows=noted.total,
            looked_at=observed.served if name == "serving-differs" else None,
            places=tuple(f"{sources[file]}:{line}" for file, line in noted.first),
            detail=observed.details.get(name, ""),
        )
    if dataset.tokens and dataset.trained_tokens < FEW_TRAINED * dataset.tokens:
        share = dataset.trained_tokens / dataset.tokens
        yield Finding.of("few-trained", detail=f"{share:.2%}")
    if not observed.template:
        yield Finding.of("no-template")
    elif not observed.markers:
        yield Finding.of("no-markers")


def _outside(dataset: Dataset, vocabulary: int) -> Finding:
    rows: dict[str, None] = {}
    for document in dataset.documents:
        if (document.tokens_T >= vocabulary).any():
            rows[f"{document.source}:{document.line}"] = None
    largest = dataset.observed.largest
    return Finding.of(
        "outside-vocabulary",
        rows=len(rows),
        places=tuple(rows)[:NAMED],
        detail=f"the largest id is {largest}, and the vocabulary has {vocabulary}",
    )


def _order(finding: Finding) -> int:
    return [*FINDINGS].index(finding.id)


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "level": finding.level,
        "what": finding.what,
        "rows": finding.rows,
        "looked_at": finding.looked_at,
        "places": list(finding.places),
        "detail": finding.detail,
        "remedy": finding.remedy,
    }
