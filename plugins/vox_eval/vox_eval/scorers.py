"""The built-in scorers.

exact       the answer equals a right one, without the blanks around it
contains    a right answer is part of the answer
regex       a right answer, a regular expression, is found in the answer
numeric     the last number of the answer equals that of a right one, within a tolerance
similarity  chrF of the answer and the right one that is most like it
choice      the right one of several ends is the most likely
likelihood  bits per byte of the right answer
perplexity  bits per byte of a text, and the perplexity of its tokens
"""

from __future__ import annotations

import math
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from vox_eval.scorer import Asks, Example, Output, Score, Scorer, ScorerSpec, hookimpl, options

_NUMBER = re.compile(
    r"(?:(?<!\w)[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
)
_LARGEST = 700.0
"""Nats of which `math.exp` is a number."""
_SHOWN = 200
"""Characters of an answer in the words of a score."""


class _WithIdeal(Scorer):
    """An answer against the right ones of its row."""

    def check(self, example: Example) -> None:
        if not example.ideal:
            raise ValueError('no "ideal"')


class _WithText(_WithIdeal):
    """An answer that holds a right one, or is like it."""

    def check(self, example: Example) -> None:
        super().check(example)
        if not all(each.strip() for each in example.ideal):
            raise ValueError('a blank "ideal", which is part of every answer')


def _first(example: Example, fits: Callable[[str], bool], how: str, found: str = "") -> Score:
    """Score 1 if one of the right answers fits, and name it."""
    right = next(filter(fits, example.ideal), None)
    if right is None:
        shown = " or ".join(map(repr, example.ideal))
        return Score(0.0, f"{found}not {how} {shown}"[:_SHOWN])
    return Score(1.0, f"{found}{how} {right!r}"[:_SHOWN])


@options
class Exact(_WithIdeal):
    """The answer equals a right one, without the blanks around both."""

    ignore_case: bool = False

    def score(self, example: Example, output: Output) -> Score:
        answer = self._plain(output.text)
        return _first(example, lambda ideal: answer == self._plain(ideal), "equal to")

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


@options
class Contains(_WithText):
    """A right answer is part of the answer."""

    ignore_case: bool = False

    def score(self, example: Example, output: Output) -> Score:
        answer = self._plain(output.text)
        return _first(example, lambda ideal: self._plain(ideal) in answer, "containing")

    def _plain(self, text: str) -> str:
        return text.casefold() if self.ignore_case else text


@options
class Regex(_WithText):
    """A right answer, a regular expression of Python's `re`, is found in the answer."""

    ignore_case: bool = False

    def check(self, example: Example) -> None:
        super().check(example)
        for ideal in example.ideal:
            try:
                re.compile(ideal)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"no regular expression: {ideal!r} ({error})") from None

    def score(self, example: Example, output: Output) -> Score:
        flags = re.IGNORECASE if self.ignore_case else 0
        return _first(example, lambda ideal: bool(re.search(ideal, output.text, flags)), "matching")


@options
class Numeric(_WithIdeal):
    """The last number of the answer equals the last of a right one.

    Args:
        tolerance: greatest difference that counts as equal.
        relative_tolerance: the same, as a fraction of the right number.
    """

    tolerance: float = Field(0.0, ge=0)
    relative_tolerance: float = Field(0.0, ge=0)

    def check(self, example: Example) -> None:
        super().check(example)
        if wrong := [ideal for ideal in example.ideal if last_number(ideal) is None]:
            raise ValueError(f"no number: {wrong[0]!r}")

    def score(self, example: Example, output: Output) -> Score:
        found = last_number(output.text)
        if found is None:
            return Score(0.0, "no number")
        return _first(example, lambda ideal: self._equal(found, ideal), "equal to", f"{found:g}: ")

    def _equal(self, found: float, ideal: str) -> bool:
        right = last_number(ideal)
        assert right is not None
        return abs(found - right) <= max(self.tolerance, self.relative_tolerance * abs(right))


def last_number(text: str) -> float | None:
    """Return the last decimal number of a text, with or without commas between thousands."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


# --- similarity -----------------------------------------------------------------------------------


@options
class Similarity(_WithText):
    """chrF of the answer and the right one most like it, from 0 to 1 (Popovic 2015, "chrF:
    character n-gram F-score for automatic MT evaluation", WMT), as sacrebleu's `sentence_chrf`
    without its factor of 100.

    Args:
        word_order: longest n-grams of words; 2 is chrF++.
    """

    binary: ClassVar[bool] = False
    word_order: int = Field(0, ge=0, le=4)

    def score(self, example: Example, output: Output) -> Score:
        found = [chrf(output.text, ideal, self.word_order) for ideal in example.ideal]
        best = max(found)
        return Score(best, f"like {example.ideal[found.index(best)]!r}"[:_SHOWN])


def chrf(answer: str, ideal: str, word_order: int = 0) -> float:
    """Return the F-score, with recall twice as important as precision, of n-grams of up to 6
    characters, blanks left out, and of up to `word_order` words, punctuation apart."""
    precisions, recalls = list[float](), list[float]()
    for own, other in zip(_n_grams(answer, word_order), _n_grams(ideal, word_order), strict=True):
        if own and other:
            both = (own & other).total()
            precisions.append(both / own.total())
            recalls.append(both / other.total())
    if not precisions:
        return 0.0
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return 5 * precision * recall / (4 * precision + recall) if precision + recall else 0.0


def _n_grams(text: str, word_order: int) -> Iterator[Counter[Any]]:
    letters = "".join(text.split())
    for n in range(1, 7):
        yield Counter(letters[at : at + n] for at in range(len(letters) - n + 1))
    words = [part for word in text.split() for part in _apart(word)]
    for n in range(1, word_order + 1):
        yield Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


def _apart(word: str) -> list[str]:
    """Split one punctuation mark off a word, at its end or else at its beginning."""
    if len(word) > 1 and word[-1] in string.punctuation:
        return [word[:-1], word[-1]]
    if len(word) > 1 and word[0] in string.punctuation:
        return [word[0], word[1:]]
    return [word]


# --- log-probabilities ----------------------------------------------------------------------------


@options
class Choice(Scorer):
    """The most likely of the row's choices is the right one; of equals, the first counts.

    Args:
        normalise: compare the log-probability of a whole choice (`none`), or its mean per byte of
            UTF-8 (`bytes`), so that long choices are not at a disadvantage.
    """

    asks: ClassVar[Asks] = "choices"
    normalise: Literal["none", "bytes"] = "none"

    def score(self, example: Example, output: Output) -> Score:
        sums = [float(each.sum(dtype="float64")) for each in output.log_probs]
        if self.normalise == "bytes":
            pairs = zip(sums, example.choices, strict=True)
            sums = [total / len(choice.encode()) for total, choice in pairs]
        best = example.choices[max(range(len(sums)), key=sums.__getitem__)]
        shown = ", ".join(f"{each:.4f}" for each in sums)
        return Score(float(best in example.ideal), f"log-probabilities {shown}", answer=best)


@options
class Perplexity(Scorer):
    """Bits per byte of a text: the mean of a task weighs each text by its bytes, which is the bits
    of all texts per byte of them."""

    asks: ClassVar[Asks] = "text"
    binary: ClassVar[bool] = False
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "bits per byte"

    def score(self, example: Example, output: Output) -> Score:
        size, total = len(example.text.encode()), _total(output)
        tokens = sum(map(len, output.log_probs))
        why = f"{-total:.4f} nats, {tokens} tokens, {size} bytes"
        return Score(-total / math.log(2) / size, why, weight=size)

    def metrics(self, outputs: Sequence[Output]) -> dict[str, float]:
        tokens = sum(len(part) for each in outputs for part in each.log_probs)
        mean = -sum(map(_total, outputs)) / tokens
        return {"perplexity": math.exp(mean) if mean < _LARGEST else sys.float_info.max}


@options
class Likelihood(Perplexity):
    """Bits per byte of the right answer after its prompt, weighed by its bytes."""

    asks: ClassVar[Asks] = "ideal"

    def score(self, example: Example, output: Output) -> Score:
        size, total = len(example.ideal[0].encode()), _total(output)
        return Score(-total / math.log(2) / size, f"{-total:.4f} nats, {size} bytes", weight=size)


def _total(output: Output) -> float:
    return math.fsum(float(part.sum(dtype="float64")) for part in output.log_probs)


# --- hook -----------------------------------------------------------------------------------------

_KINDS: dict[str, type[Scorer]] = {
    "exact": Exact,
    "contains": Contains,
    "regex": Regex,
    "numeric": Numeric,
    "choice": Choice,
    "perplexity": Perplexity,
    "likelihood": Likelihood,
    "similarity": Similarity,
}


@hookimpl
def vox_scorer(spec: ScorerSpec) -> Scorer:
    """Return a built-in scorer."""
    return _KINDS[spec.name](**spec.options)
