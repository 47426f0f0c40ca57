"""Write a Hugging Face tokenizer into the metadata of a GGUF file.

Read from the tokenizer as transformers built it, which is what a run trained with. A byte-level BPE
is named by its pre-tokenizer: `PRE` lists those that llama.cpp has, by the steps and regular
expressions themselves, so that added tokens change nothing. A SentencePiece BPE gets the ranks of
its merges as scores. Whatever llama.cpp would tokenise otherwise is refused, or is a note.

llama.cpp ends an answer at three tokens that a file names: end of sequence, of turn, of message.
Every token that ends an answer in vox becomes one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gguf import GGUFWriter, TokenType

from vox_core.api.tokenizers import end_of_turn_ids, load_tokenizer
from vox_core.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_WITH_SUFFIX = [part + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for part in _CASED]
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE: Mapping[tuple[str, ...], str] = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_LETTERS + r"\p{N}{1,3}" + _REST, "whole words"): "llama-bpe",
    (_LETTERS + r"\p{N}{1,3}" + _REST,): "dbrx",
    (_LETTERS + r"\p{N}" + _REST,): "qwen2",
    (_MARKS + r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",): "qwen35",
    ("|".join(_CASED) + r"|\p{N}" + _SLASHED,): "tekken",
    ("|".join(_WITH_SUFFIX) + r"|\p{N}{1,3}" + _SLASHED,): "gpt-4o",
}
"""Steps of a pre-tokenizer -> llama.cpp's `tokenizer.ggml.pre`. `bytes` is GPT-2's expression,
`digits` splits off every digit; `whole words`: a word of the vocabulary is not merged up from its
bytes (`ignore_merges`)."""

STOP_KEYS = ("eos", "eot", "eom")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PHI3 = re.compile(r"phi-?3", re.IGNORECASE)
_OF_PHI3 = {"<unk>", "<s>", "</s>", "<|endoftext|>"}
_SPECIAL_BY_LOOK = re.compile("<\\|.*\\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's metadata in a GGUF file.

    Args:
        model: `gpt2` for byte-level BPE, `llama` for SentencePiece.
        scores: of SentencePiece only; `merges`: of byte-level BPE only.
        special: `bos`, `eos`, `eot`, `eom`, `unk`, `pad` -> id.
        template: chat template, or several by name.
        space_prefix: SentencePiece begins a text with a space.
        strips: special tokens take in the whitespace after them, as Phi-3's do.
        notes: texts that llama.cpp tokenises otherwise.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    special: Mapping[str, int]
    template: str | Mapping[str, str] | None
    add_bos: bool
    add_eos: bool
    space_prefix: bool | None = None
    strips: bool = False
    notes: Sequence[str] = ()

    def model_name(self, name: str) -> str:
        """Return a `general.name` with which llama.cpp tokenises as this tokenizer does.

        In a model named Phi-3, llama.cpp strips whitespace after special tokens, and fails to load
        without those of Phi-3.
        """
        if not self.strips:
            return _PHI3.sub(lambda found: f"{found[0][:3]} 3", name)
        return name if _PHI3.search(name) else f"{name} (Phi-3)"

    def write(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, token in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.space_prefix is not None:
            writer.add_add_space_prefix(self.space_prefix)
        if isinstance(self.template, str):
            writer.add_chat_template(self.template)
        elif self.template:
            writer.add_chat_template(
                [{"name": name, "template": text} for name, text in self.template.items()]
            )


def vocabulary_in(folder: Path, size: int) -> Vocabulary:
    """Return `read_vocabulary` of the tokenizer in `folder`."""
    return read_vocabulary(load_tokenizer(folder), size, folder)


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, where: Path) -> Vocabulary:
    """Return what a GGUF file says of `tokenizer`.

    Args:
        size: rows of the embedding.
        where: the tokenizer's folder, for errors.

    Raises:
        ModelError: M002, with every reason why llama.cpp would tokenise or stop otherwise.
    """
    described: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    faults: list[str] = []
    model = described["model"]
    sentencepiece = bool(model.get("byte_fallback"))
    if model["type"] != "BPE":
        raise _refused(where, [f"a tokenizer of type {model['type']}, expected BPE"])
    pre = "default" if sentencepiece else _pre(described, faults)
    before, after = _added_around(tokenizer, faults)
    special = _special(tokenizer, faults)
    if (count := max(tokenizer.get_vocab().values()) + 1) > size:
        faults.append(f"{count} tokens, but {size} rows of the embedding")
    prefix = _space_prefix(described) if sentencepiece else None
    notes = list(_notes(described, sentencepiece, faults))
    stripping = any(t.special and t.rstrip for t in tokenizer.added_tokens_decoder.values())
    strips = stripping and tokenizer.get_vocab().keys() >= _OF_PHI3
    if stripping and not strips:
        notes.append("llama.cpp keeps whitespace after a special token, this tokenizer drops it")
    if faults:
        raise _refused(where, faults)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    tokens, types = _tokens(tokenizer, size, sentencepiece)
    return Vocabulary(
        model="llama" if sentencepiece else "gpt2",
        pre=pre,
        tokens=tokens,
        types=types,
        scores=_scores(model["vocab"], merges, types) if sentencepiece else (),
        merges=() if sentencepiece else [" ".join(map(_no_space, pair)) for pair in merges],
        special=special,
        template=tokenizer.chat_template or None,
        add_bos=before,
        add_eos=after,
        space_prefix=prefix,
        strips=strips,
        notes=tuple(notes),
    )


def _tokens(
    tokenizer: PreTrainedTokenizerBase, size: int, sentencepiece: bool
) -> tuple[list[str], list[int]]:
    """Return text and type of each id; ids without a token are padding that is never produced."""
    tokens = [f"[PAD{n}]" for n in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for token, number in tokenizer.get_vocab().items():
        is_byte = sentencepiece and _BYTE.fullmatch(token)
        tokens[number], types[number] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        text = added.content
        if number == tokenizer.unk_token_id and sentencepiece:
            types[number] = TokenType.UNKNOWN
        elif added.special or _SPECIAL_BY_LOOK.fullmatch(text):
            types[number] = TokenType.CONTROL
        else:
            types[number], text = TokenType.USER_DEFINED, text.replace("▁", " ")
        tokens[number] = text
    return tokens, types


def _scores(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, ...]], types: Sequence[int]
) -> list[float]:
    """Return scores by which SentencePiece merges in the order of `merges`.

    llama.cpp merges first what makes the token with the highest score. Tokens that no merge makes
    follow in the order of their ids.
    """
    made = dict.fromkeys("".join(pair) for pair in merges)
    others = (token for token in sorted(vocab, key=vocab.__getitem__) if token not in made)
    normal = [t for t in (*made, *others) if types[vocab[t]] == TokenType.NORMAL]
    scores = [-1000.0 if kind in (3, 4) else 0.0 for kind in types]
    for rank, token in enumerate(normal):
        scores[vocab[token]] = -float(rank)
    return scores


def _no_space(part: str) -> str:
    """Spell a space as byte-level BPE does, since a space separates the parts of a merge."""
    return part.replace(" ", "Ġ")


def _pre(described: Mapping[str, Any], faults: list[str]) -> str:
    steps: list[str] = []
    for step in _steps(described, "pre_tokenizer"):
        kind = step["type"]
        if kind == "Digits" and step["individual_digits"]:
            steps.append("digits")
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            steps += ["bytes"] * step["use_regex"]
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            steps.append(step["pattern"].get("Regex") or step["pattern"].get("String"))
        else:
            steps.append(f"{kind} {step}")
    whole = bool(described["model"].get("ignore_merges"))
    found = PRE.get((*steps, "whole words")) if whole else PRE.get(tuple(steps))
    if found is None and whole:
        found = PRE.get(tuple(steps)) if PRE.get(tuple(steps)) == "tekken" else None
    if found is None:
        faults.append(
            f"a pre-tokenizer that llama.cpp does not name: {' | then | '.join(steps) or 'none'}"
        )
    return found or ""


def _added_around(tokenizer: PreTrainedTokenizerBase, faults: list[str]) -> tuple[bool, bool]:
    """Return whether the tokenizer adds BOS before, and EOS after, a text."""
    whole: list[int] = tokenizer("a")["input_ids"]
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    bos, eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for before in (False, True):
        for after in (False, True):
            if bos * before + bare + eos * after == whole:
                return before, after
    faults.append("special tokens other than BOS before and EOS after a text")
    return False, False


def _special(tokenizer: PreTrainedTokenizerBase, faults: list[str]) -> dict[str, int]:
    stops = end_of_turn_ids(tokenizer)
    eos = tokenizer.eos_token_id
    ordered = [eos] if eos is not None else []
    ordered += sorted(stops - set(ordered))
    if len(ordered) > len(STOP_KEYS):
        faults.append(f"{len(ordered)} tokens end an answer, and a GGUF file names three")
    named = {
        "bos": tokenizer.bos_token_id,
        **dict(zip(STOP_KEYS, ordered, strict=False)),
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    return {name: int(token) for name, token in named.items() if token is not None}


def _steps(
    described: Mapping[str, Any], kind: Literal["normalizer", "pre_tokenizer"]
) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, in their order."""
    outer = described[kind]
    return list(outer.get(f"{kind.replace('_', '')}s", [outer])) if outer else []


def _space_prefix(described: Mapping[str, Any]) -> bool:
    """Return whether a text begins with a space that is not there."""
    return any(step["type"] == "Prepend" for step in _steps(described, "normalizer")) or any(
        step["type"] == "Metaspace" and step["prepend_scheme"] != "never"
        for step in _steps(described, "pre_tokenizer")
    )


def _notes(described: Mapping[str, Any], sentencepiece: bool, faults: list[str]) -> Iterator[str]:
    for step in _steps(described, "normalizer"):
        if step["type"] == "NFC":
            yield "llama.cpp does not normalise texts to NFC, as this model's tokenizer does"
        elif not (sentencepiece and step["type"] in ("Prepend", "Replace")):
            faults.append(f"the normalizer {step['type']}")
    pre = _steps(described, "pre_tokenizer")
    if any(step.get("prepend_scheme") == "first" for step in pre):
        yield (
            "llama.cpp puts a space after each special token, this model's tokenizer only at the "
            "beginning of a text"
        )


def _refused(where: Path, faults: Sequence[str]) -> ModelError:
    return ModelError(
        "M002",
        "llama.cpp cannot tokenise as this model does",
        where=where,
        faults=faults,
        remedy="export to another format, such as --to peft or --to mlx",
    )
