"""Convert the metadata of a GGUF file to the tokenizer of a Hugging Face folder.

A GGUF holds the vocabulary, the merges (for some vocabularies) and the ids of the special tokens.
Pre-tokenization is only named, by `tokenizer.ggml.pre`; `BUILDERS` has one builder for each name.
Names without one are refused, because a wrong pre-tokenizer makes a model slightly worse
everywhere, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from vox_formats import FormatError

Metadata: TypeAlias = Mapping[str, Any]

_REFUSED = "the GGUF file cannot be converted"

# llama.cpp's token types, as in the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer; its pair (model, pre) must be a key of `BUILDERS`.

    Raises:
        FormatError: two tokens are equal, so that ids would move; or the metadata describe no
            tokenizer.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    try:
        tokenizer = BUILDERS[tokenizer_kind(metadata)](metadata, tokens)
        _add_special_tokens(tokenizer, metadata, tokens)
        _add_bos_and_eos(tokenizer, metadata, tokens)
    except Exception as error:  # ids and merges may be anything; tokenizers raises Exception itself
        raise FormatError(
            _REFUSED,
            found=f"tokenizer metadata that fail with {type(error).__name__}: {error}",
            expected="tokens, merges and ids of special tokens that belong together",
        ) from error
    if tokenizer.get_vocab_size() != len(tokens):
        raise FormatError(
            _REFUSED,
            found=f"{tokenizer.get_vocab_size()} different tokens",
            expected=f"{len(tokens)}, one for each id",
        )
    return tokenizer


def tokenizer_config(metadata: Metadata, max_length: int) -> dict[str, Any]:
    """Return `tokenizer_config.json`, which lists special tokens and makes transformers use
    tokenizer.json unchanged."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(key) for name, key in _NAMED.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[number] for name, number in ids.items() if number is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def tokenizer_kind(metadata: Metadata) -> tuple[str, str]:
    """Return the tokenizer's model and the name of its pre-tokenization."""
    model = metadata.get("tokenizer.ggml.model", "none")
    return str(model), str(metadata.get("tokenizer.ggml.pre", "default"))


# --- the models -----------------------------------------------------------------------------------


def _byte_level(metadata: Metadata, tokens: Sequence[str], digits: bool) -> Tokenizer:
    """Build GPT-2's byte-level BPE; with `digits`, every digit is split off first."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=_numbered(tokens), merges=merges))
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut])
        if digits
        else cut
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _smollm(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    return _byte_level(metadata, tokens, digits=True)


def _gpt2(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    return _byte_level(metadata, tokens, digits=False)


def _gemma(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    """Build SentencePiece BPE with byte fallback and without a prefix space."""
    spelled = _gemma_spelling(tokens)
    model = models.BPE(
        vocab=_numbered(spelled),
        merges=merges_by_rank(spelled),
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _gemma_spelling(tokens: Sequence[str]) -> list[str]:
    """Convert tokens that consist of spaces only to the model's ▁."""
    return ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]


def merges_by_rank(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Derive the merges of a vocabulary that lists none: every split of a token into two others.

    A token that was learned earlier has the lower id, so the order of ids is the order of merges.
    """
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


BUILDERS: Mapping[tuple[str, str], Callable[[Metadata, Sequence[str]], Tokenizer]] = {
    ("gpt2", "smollm"): _smollm,
    ("gpt2", "gpt-2"): _gpt2,
    ("llama", "default"): _gemma,
}


# --- special tokens -------------------------------------------------------------------------------


def _add_special_tokens(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    """Add the tokens that llama.cpp never splits; control tokens are special, user-defined ones are
    not."""
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    spelled = _gemma_spelling(tokens) if tokenizer_kind(metadata)[0] == "llama" else tokens
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(spelled, kinds, strict=False)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    """Add BOS and EOS as the file says; SentencePiece vocabularies add BOS by default."""
    ids = {name: metadata.get(_NAMED[f"{name}_token"]) for name in ("bos", "eos")}
    begin = metadata.get("tokenizer.ggml.add_bos_token", tokenizer_kind(metadata)[0] == "llama")
    end = metadata.get("tokenizer.ggml.add_eos_token", False)
    wanted: dict[str, Any] = {name: ids[name] for name, on in (("bos", begin), ("eos", end)) if on}
    if not wanted:
        return
    before = [tokens[wanted["bos"]]] if "bos" in wanted else []
    after = [tokens[wanted["eos"]]] if "eos" in wanted else []
    single = [*before, "$A", *after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{piece}:1" for piece in (*before, "$B", *after))],
        special_tokens=[(tokens[number], number) for number in wanted.values()],
    )
