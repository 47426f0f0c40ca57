"""Which languages some texts are in.

`py3langid` (extra `data`) names languages; without it, the scripts of Unicode are counted. Both
look at each text by itself, and leave out what has hardly a letter. A sentence may be told wrongly;
the mix of a thousand is what this is for.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

LEAST_LETTERS = 12
LEAST_PROBABLE = 0.7
UNCLEAR = "unclear"


def language_mix(texts: Sequence[str]) -> tuple[str, Counter[str]]:
    """How it was found out (`languages` or `scripts`), and name -> texts."""
    by, name_of = _by_language()
    if name_of is None:
        by, name_of = "scripts", script
    counts = Counter(
        name_of(text) if _letters(text) >= LEAST_LETTERS else UNCLEAR for text in texts
    )
    return by, counts


def script(text: str) -> str:
    """The script of most of its letters, such as `latin`."""
    counts: Counter[str] = Counter()
    for character, times in Counter(text).items():
        if name := _script(character):
            counts[name] += times
    return counts.most_common(1)[0][0] if counts else UNCLEAR


@cache
def _script(character: str) -> str | None:
    if not character.isalpha():
        return None
    name = unicodedata.name(character, "other").split(" ")[0].split("-")[0].lower()
    return "kana" if name in ("hiragana", "katakana") else name


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text[:200]))


def _by_language() -> tuple[str, Callable[[str], str] | None]:
    try:
        identifier = _identifier()
    except ImportError:
        return "", None

    def name_of(text: str) -> str:
        name, probability = identifier.classify(text)
        return str(name) if probability >= LEAST_PROBABLE else UNCLEAR

    return "languages", name_of


def _identifier() -> Any:
    from py3langid import langid

    return _load(langid)


@cache
def _load(langid: Any) -> Any:
    """It takes most of a second."""
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
