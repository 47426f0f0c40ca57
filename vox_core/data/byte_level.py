"""Byte-level BPE by fastokens: the same tokens as `tokenise` gives, at a quarter of the time.

fastokens (https://github.com/crusoecloud/fastokens) gives ids alone. In byte-level BPE (Radford et
al., "Language Models are Unsupervised Multitask Learners", 2019) each id stands for bytes that are
known, so that the ids say where their characters are. They also say whether they are the text's:
where their bytes are not, byte for byte, all texts of the batch are given to the tokenizer itself.
Texts for which that is known beforehand are given to it alone: those that NFC would change (looked
at whether or not the tokenizer does that), with a character that has no token, or very long.

What could still differ is how a text is cut. Some texts of each batch are cut by both, and one that
is cut otherwise is a `Disagreement`: whoever meets it begins again without this module.

Shape legend: T tokens of all texts, R texts, V entries of the vocabulary, B bytes of all texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unicodedata import is_normalized

import numpy as np

from vox_core.data.tokens import Tokens, bounds_of, joined, tokenise

if TYPE_CHECKING:
    from fastokens import Tokenizer
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_ONE_IN = 64
"""Texts of a batch that are cut by both; two percent of the time."""
_LONG = 1 << 13
"""Characters; fastokens cuts texts of 16 KiB and more in stretches, by several threads."""
_CUTTERS = {"ByteLevel", "Digits", "Split"}


class Disagreement(Exception):
    """fastokens has cut a text otherwise than its tokenizer."""


class ByteLevel:
    """Tokenises for one tokenizer; `of` says whether it can.

    Args:
        quick: the same tokenizer, read by fastokens.
        vocabulary: the bytes that each id stands for.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        quick: Tokenizer,
        vocabulary: Mapping[int, bytes],
    ) -> None:
        self._tokenizer, self._quick = tokenizer, quick
        self._bytes_V = [vocabulary.get(id, b"") for id in range(1 + max(vocabulary))]
        self._lengths_V = np.array([len(one) for one in self._bytes_V], np.int64)
        single = set(vocabulary.values())
        lacking = [byte for byte in range(0x80) if bytes([byte]) not in single]
        self._without_a_token = re.compile("|".join(re.escape(chr(b)) for b in lacking) or "(?!)")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteLevel | None:
        """None for a tokenizer that is not byte-level BPE, or has parts that fastokens lacks."""
        from fastokens import Tokenizer

        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(tokenizer, "split_special_tokens", False):
            return None
        made_of: dict[str, Any] = json.loads(backend.to_str())
        if not _is_byte_level(made_of):
            return None
        try:
            quick = Tokenizer.from_json_str(
                json.dumps({**made_of, "truncation": None, "padding": None})
            )
        except ValueError:
            return None
        return cls(tokenizer, quick, _vocabulary(made_of))

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """As `tokenise`.

        Raises:
            Disagreement: one of the texts that were cut by both is cut otherwise.
        """
        left = [number for number, text in enumerate(texts) if self._is_left(text)]
        quick = sorted(set(range(len(texts))) - set(left))
        some = [texts[number] for number in quick]
        if not some or (tokens := self._tokens(some)) is None:
            return tokenise(self._tokenizer, texts)
        self._compare(some, tokens)
        if not left:
            return tokens
        others = [texts[number] for number in left]
        by_number = dict(zip(quick, _split(tokens, some), strict=True))
        by_number |= zip(left, _split(tokenise(self._tokenizer, others), others), strict=True)
        return _in_order(texts, by_number)

    def _is_left(self, text: str) -> bool:
        """For the tokenizer: long texts, which fastokens cuts in stretches, and what the ids would
        not stand for."""
        return (
            len(text) > _LONG
            or self._without_a_token.search(text) is not None
            or not is_normalized("NFC", text)
        )

    def _compare(self, texts: Sequence[str], tokens: Tokens) -> None:
        by_both = texts[::_ONE_IN]
        theirs = _split(tokenise(self._tokenizer, by_both), by_both)
        if any(map(_differ, _split(tokens, texts, _ONE_IN), theirs)):
            raise Disagreement

    def _tokens(self, texts: list[str]) -> Tokens | None:
        """None if the ids do not stand for the texts."""
        try:
            written = [text.encode() for text in texts]
            ids, bounds = self._quick.encode_batch_flat(texts, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001  # half a character, a byte without a token, a panic
            return None
        ids_T = np.frombuffer(ids, "<u4").astype(np.int32)
        bounds_R1 = np.frombuffer(bounds, "<u8").astype(np.int64)
        stops_T = np.cumsum(self._lengths_V[ids_T])
        bytes_R1 = bounds_of([len(one) for one in written])
        reached_R1 = np.concatenate([[0], stops_T])[bounds_R1]
        data = b"".join(written)
        if not np.array_equal(reached_R1, bytes_R1) or data != self._stand_for(ids_T):
            return None
        begins_T = stops_T - self._lengths_V[ids_T]
        characters_R1 = bounds_of([len(text) for text in texts])
        if characters_R1[-1] != len(data):
            character_B = _characters(data)
            begins_T, stops_T = character_B[begins_T], character_B[stops_T - 1] + 1
        shift_T = np.repeat(characters_R1[:-1], np.diff(bounds_R1))
        return joined(ids_T, begins_T, stops_T, shift_T, bounds_R1)

    def _stand_for(self, ids_T: NDArray[np.int32]) -> bytes:
        return b"".join(map(self._bytes_V.__getitem__, ids_T.tolist()))


def _is_byte_level(made_of: Mapping[str, Any]) -> bool:
    """Whether ids are the bytes of the text, whatever the normalizer leaves of it, and characters
    are reported with the spaces at the ends of a token."""
    model, normalizer = made_of["model"], made_of["normalizer"]
    cutters = list(_parts(made_of["pre_tokenizer"]))
    maps = [cutter for cutter in cutters if cutter["type"] == "ByteLevel"]
    return (
        model["type"] == "BPE"
        and not model["dropout"]
        and (normalizer is None or normalizer["type"] == "NFC")
        and {cutter["type"] for cutter in cutters} <= _CUTTERS
        and [cutter["add_prefix_space"] for cutter in maps] == [False]
        and not any(part.get("trim_offsets") for part in _parts(made_of["post_processor"]))
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"]
            for token in made_of["added_tokens"]
        )
    )


def _parts(made_of: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A part of a tokenizer, or the parts of a sequence."""
    if made_of is None:
        return
    if made_of["type"] != "Sequence":
        yield made_of
    for part in made_of.get("pretokenizers", made_of.get("processors", ())):
        yield from _parts(part)


def _vocabulary(made_of: Mapping[str, Any]) -> dict[int, bytes]:
    byte_of = _bytes_as_characters()
    found = {
        id: bytes(byte_of[character] for character in token)
        for token, id in made_of["model"]["vocab"].items()
        if byte_of.keys() >= set(token)
    }
    return found | {added["id"]: added["content"].encode() for added in made_of["added_tokens"]}


def _bytes_as_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(0x100, 0x100 + len(others))]
    return dict(zip(map(chr, characters), printable + others, strict=True))


def _characters(data: bytes) -> NDArray[np.int64]:
    """The number of the character that each byte is of."""
    starts_B = np.frombuffer(data, np.uint8) & 0xC0 != 0x80
    return np.cumsum(starts_B) - 1


def _split(tokens: Tokens, texts: Sequence[str], step: int = 1) -> list[Tokens]:
    """The tokens of every `step`-th text by itself."""
    starts, bounds = bounds_of([len(text) for text in texts]), tokens.bounds_R1
    extents = [(bounds[n], bounds[n + 1], starts[n]) for n in range(0, len(texts), step)]
    return [
        Tokens(
            tokens.ids_T[a:b],
            tokens.begins_T[a:b] - start,
            tokens.stops_T[a:b] - start,
            np.array([0, b - a]),
        )
        for a, b, start in extents
    ]


def _in_order(texts: Sequence[str], by_number: Mapping[int, Tokens]) -> Tokens:
    """The tokens of all texts, from those of each."""
    parts = [by_number[n] for n in range(len(texts))]
    bounds_R1 = bounds_of([len(part.ids_T) for part in parts])
    shift_T = np.repeat(bounds_of([len(text) for text in texts])[:-1], np.diff(bounds_R1))
    return Tokens(
        np.concatenate([part.ids_T for part in parts]),
        np.concatenate([part.begins_T for part in parts]) + shift_T,
        np.concatenate([part.stops_T for part in parts]) + shift_T,
        bounds_R1,
    )


def _differ(ours: Tokens, theirs: Tokens) -> bool:
    return not all(
        np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in Tokens.__slots__
    )
