"""The tokenizer that a GGUF file describes, as the files of a Hugging Face folder.

A GGUF holds the vocabulary, the merges (for some vocabularies) and the ids of the special tokens.
How text is cut before the merges apply is only named, by `tokenizer.ggml.pre`; what the names mean
is written here, one builder for each. A name that is not here is refused: a wrong pre-tokenizer
gives a model that is a little worse everywhere, and nobody would see why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vox_core.gguf.source import GgufSource, unconvertible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# llama.cpp's token types, as in the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def build_tokenizer(source: GgufSource) -> Tokenizer:
    """The tokenizer; its pair (model, pre) must be a key of `BUILDERS`.

    Raises:
        ModelError: M008, the tokens do not keep their ids.
    """
    tokens = source.value("tokenizer.ggml.tokens")
    tokenizer = BUILDERS[tokenizer_kind(source)](source, tokens)
    _add_special_tokens(tokenizer, source, tokens)
    _add_bos_and_eos(tokenizer, source, tokens)
    if tokenizer.get_vocab_size() != len(tokens):
        raise unconvertible(
            source.path,
            found=f"{tokenizer.get_vocab_size()} different tokens",
            expected=f"{len(tokens)}, one for each id",
            remedy="use the model's Hugging Face repository instead of the GGUF file",
        )
    return tokenizer


def tokenizer_config(source: GgufSource, max_length: int) -> dict[str, Any]:
    """`tokenizer_config.json`: which tokens are special, and to take tokenizer.json as it is."""
    tokens = source.value("tokenizer.ggml.tokens")
    ids = {name: source.value(key) for name, key in _NAMED.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[number] for name, number in ids.items() if number is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def tokenizer_kind(source: GgufSource) -> tuple[str, str]:
    """What the file says of its tokenizer: the model, and how text is cut before it."""
    model = source.value("tokenizer.ggml.model", "none")
    return str(model), str(source.value("tokenizer.ggml.pre", "default"))


# --- the models -----------------------------------------------------------------------------------


def _byte_level(source: GgufSource, tokens: Sequence[str], digits: bool) -> Tokenizer:
    """GPT-2's byte-level BPE; with `digits`, every digit is cut off before anything else."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in source.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=_numbered(tokens), merges=merges))
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut])
        if digits
        else cut
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _smollm(source: GgufSource, tokens: Sequence[str]) -> Tokenizer:
    return _byte_level(source, tokens, digits=True)


def _gpt2(source: GgufSource, tokens: Sequence[str]) -> Tokenizer:
    return _byte_level(source, tokens, digits=False)


def _gemma(source: GgufSource, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece BPE with byte fallback and without a prefix space."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    spelled = _gemma_spelling(tokens)
    model = models.BPE(
        vocab=_numbered(spelled),
        merges=merges_by_rank(spelled),
        unk_token=tokens[source.value("tokenizer.ggml.unknown_token_id")],
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
    """Tokens of nothing but spaces are stored as spaces; the model knows them as ▁."""
    return ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]


def merges_by_rank(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that lists none: every way to make a token out of two others.

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


BUILDERS: Mapping[tuple[str, str], Callable[[GgufSource, Sequence[str]], Tokenizer]] = {
    ("gpt2", "smollm"): _smollm,
    ("gpt2", "gpt-2"): _gpt2,
    ("llama", "default"): _gemma,
}


# --- special tokens -------------------------------------------------------------------------------


def _add_special_tokens(tokenizer: Tokenizer, source: GgufSource, tokens: Sequence[str]) -> None:
    """Keep whole what llama.cpp keeps whole; control tokens are special, the user's are not."""
    from tokenizers import AddedToken

    kinds = source.value("tokenizer.ggml.token_type", [])
    spelled = _gemma_spelling(tokens) if tokenizer_kind(source)[0] == "llama" else tokens
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(spelled, kinds, strict=False)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )


def _add_bos_and_eos(tokenizer: Tokenizer, source: GgufSource, tokens: Sequence[str]) -> None:
    """Begin and end every text as the file says; SentencePiece vocabularies begin by default."""
    from tokenizers import processors

    ids = {name: source.value(_NAMED[f"{name}_token"]) for name in ("bos", "eos")}
    begin = source.value("tokenizer.ggml.add_bos_token", tokenizer_kind(source)[0] == "llama")
    end = source.value("tokenizer.ggml.add_eos_token", False)
    wanted = {name: ids[name] for name, on in (("bos", begin), ("eos", end)) if on}
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
