"""Wrong masks found before training, from the statistics that were made with the tokens.

Nothing is rendered or tokenised here, so an audit costs nothing beside opening the data set; only
where a token is outside the vocabulary are the tokens read again, to name its rows.
`docs/guide/looking-at-data.md` prints the table `FINDINGS`, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from vox_core.data.dataset import Dataset
from vox_core.data.encode import NAMED, EncodeStats
from vox_core.errors import DataError
from vox_core.text import counted


@dataclass(frozen=True, slots=True)
class Finding:
    """Something found of a data set.

    Args:
        id: key of `FINDINGS`, which has its level, words and remedy.
        rows: how many rows; None where it is about the model or all rows together.
        looked_at: rows that were looked at, where that is not all of them.
        places: the first few rows, as `FILE:LINE`.
        detail: more words about the first of them.
    """

    id: str
    rows: int | None = None
    looked_at: int | None = None
    places: tuple[str, ...] = ()
    detail: str = ""

    @property
    def kind(self) -> Kind:
        return FINDINGS[self.id]

    def __str__(self) -> str:
        told = self.kind.what
        if self.rows is not None:
            of = "" if self.looked_at is None else f" of {self.looked_at:,} looked at"
            told = f"{counted(self.rows, 'row')}{of}: {told}"
        more = ", …" if self.rows is not None and self.rows > len(self.places) else ""
        where = f" ({', '.join(self.places)}{more})" if self.places else ""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{told}{where}{detail}; {self.kind.remedy} [{self.id}]"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **asdict(self.kind)}


@dataclass(frozen=True, slots=True)
class Audit:
    """The findings of one data set."""

    dataset: Dataset
    findings: tuple[Finding, ...] = ()

    @property
    def trained_share(self) -> float:
        tokens = self.dataset.tokens
        return self.dataset.trained_tokens / tokens if tokens else 0.0

    def __str__(self) -> str:
        dataset, stats = self.dataset, self.dataset.stats
        if stats.prompts:
            return f"{dataset.tokens:,} tokens of prompts, which the model answers"
        ended = f"{counted(stats.ended, 'row')} with a trained end-of-turn token"
        trained = f"{dataset.trained_tokens:,} trained ({self.trained_share:.1%})"
        return f"{dataset.tokens:,} tokens, {trained}; {ended}"

    def of_level(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind.level == level]

    def to_json(self) -> dict[str, Any]:
        stats = self.dataset.stats
        trained = {
            "trained_share": round(self.trained_share, 6),
            "rows_with_trained_end": stats.ended,
            "rows_without_trained_end": stats.rows - stats.ended,
        }
        about = {"prompts": stats.prompts} if stats.prompts else trained
        return {**about, "findings": [finding.to_json() for finding in self.findings]}


def audit(dataset: Dataset, vocabulary: int | None, seq_len: int) -> Audit:
    """Audit a data set.

    Args:
        vocabulary: ids that the model has embeddings for; None if it does not say.
        seq_len: the limit that the rows were encoded with.
    """
    found = sorted(_findings(dataset, vocabulary, seq_len), key=lambda it: [*FINDINGS].index(it.id))
    return Audit(dataset, tuple(found))


def require_sound(audits: Mapping[str, Audit]) -> None:
    """Refuse what must not be trained (D050, with every error that was found).

    Args:
        audits: by what the rows are for.
    """
    errors = [(what, error) for what, each in audits.items() for error in each.of_level("error")]
    if not errors:
        return
    first = errors[0][1]
    raise DataError(
        "D050",
        "the masks of the data are wrong",
        where=first.places[0] if first.places else f"the {errors[0][0]} rows",
        found=first.kind.what,
        expected="tokens of the model's vocabulary, and nothing trained but answers",
        faults=[f"{what} rows: {error}" for what, error in errors],
        remedy=first.kind.remedy,
    )


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size in a config.json: number of embeddings; None if it has none."""
    nested = config.get("text_config")
    for part in (nested, config) if isinstance(nested, Mapping) else (config,):
        for key in ("vocab_size", "padded_vocab_size"):
            if isinstance(size := part.get(key), int) and size > 0:
                return size
    return None


def row_findings(stats: EncodeStats) -> list[str]:
    """Ids of findings about single rows, the worst first."""
    return sorted(stats.findings, key=[*FINDINGS].index)


def _findings(dataset: Dataset, vocabulary: int | None, seq_len: int) -> Iterator[Finding]:
    stats = dataset.stats
    room = f"the longest row has {max(stats.lengths, default=0):,} tokens, --seq-len is {seq_len:,}"
    if vocabulary is not None and stats.largest >= vocabulary:
        yield _outside(dataset, vocabulary)
    for name, rows in stats.findings.items():
        yield Finding(
            name,
            rows=rows,
            looked_at=stats.served if name == "serving-differs" else None,
            places=tuple(f"{dataset.files[file]}:{line}" for file, line in stats.places[name]),
            detail=room if name == "prompt-too-long" else stats.details.get(name, ""),
        )
    if dataset.trained_tokens < FEW_TRAINED * dataset.tokens and not stats.prompts:
        yield Finding("few-trained", detail=f"{dataset.trained_tokens / dataset.tokens:.2%}")
    if not stats.template:
        yield Finding("no-template")
    elif not stats.markers:
        yield Finding("no-markers")


def _outside(dataset: Dataset, vocabulary: int) -> Finding:
    outside = (each for each in dataset if (each.tokens_T >= vocabulary).any())
    rows = dict.fromkeys(f"{document.source}:{document.line}" for document in outside)
    return Finding(
        "outside-vocabulary",
        rows=len(rows),
        places=tuple(rows)[:NAMED],
        detail=f"the largest id is {dataset.stats.largest}, and the vocabulary has {vocabulary}",
    )


Level: TypeAlias = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding: an error stops the run before it starts, a warning is printed, and an
    info stands in `preflight.json` and in the preview.
    """

    level: Level
    what: str
    remedy: str


FINDINGS: dict[str, Kind] = {
    "outside-vocabulary": Kind(
        "error",
        "a token that the model has no embedding for",
        "use the tokenizer that belongs to the model: its ids must be below vocab_size of "
        "config.json",
    ),
    "system-trained": Kind(
        "error",
        "the system prompt is trained",
        "set {% generation %} in the chat template around the assistant's words alone",
    ),
    "prompt-trained": Kind(
        "error",
        "what the user or a tool says is trained",
        "set {% generation %} in the chat template around the assistant's words alone",
    ),
    "no-end": Kind(
        "warning",
        "no end-of-turn token is trained",
        "use a chat template that closes each turn with a special token, or a tokenizer with an "
        "eos_token",
    ),
    "joined-answer": Kind(
        "warning",
        "the first token of the answer begins in the prompt, and is not trained",
        "move the prompt's part of it, mostly a space, to the start of the completion; in a chat "
        "template, out of the generation prompt",
    ),
    "no-answer": Kind(
        "warning",
        "a prompt without an answer, where other rows have one",
        "add the answer if the reward reads it",
    ),
    "cut-in-answer": Kind(
        "warning",
        "cut at --seq-len in the middle of an answer",
        "raise --seq-len, or shorten these rows",
    ),
    "prompt-too-long": Kind(
        "warning",
        "dropped: the prompt leaves no room for an answer within --seq-len",
        "raise --seq-len, or shorten the prompts",
    ),
    "nothing-trained": Kind(
        "warning",
        "dropped: no token of it would be trained",
        "give the assistant something to say, or remove these rows",
    ),
    "rendered-text": Kind(
        "warning",
        'a "text" row holds the chat template\'s own tokens',
        'write it as {"messages": […]}, and vox renders it and trains the answers',
    ),
    "double-bos": Kind(
        "warning",
        "begins with two beginning-of-sequence tokens",
        "remove the token from the text, or from the chat template",
    ),
    "serving-differs": Kind(
        "warning",
        "the serving prompt is not a prefix of the training text",
        "look at one with vox data preview --row, and correct the chat template",
    ),
    "few-trained": Kind(
        "warning",
        "less than 1 % of the tokens is trained",
        "shorten the prompts, or split long conversations",
    ),
    "no-template": Kind(
        "info",
        "the model has no chat template",
        "name one with --template chatml, or use an -instruct model",
    ),
    "no-markers": Kind(
        "info", "the chat template has no {% generation %} markers", "nothing needs to be done"
    ),
}
FEW_TRAINED = 0.01
