"""Train a tokenizer like a model's on the texts of data files.

It has the model's special tokens, normaliser and rules for cutting text into words; its vocabulary
is new. Only byte-level BPE can be trained: with a token for every byte, no character that the data
lacks is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

from vox_core.api.models import Progress
from vox_core.api.rows import CheckedFile, Record, read_lines, row_text
from vox_core.errors import ConfigError, VoxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLE = 1_000_000


def trained_like(
    tokenizer: PreTrainedTokenizerBase,
    files: Sequence[CheckedFile],
    size: int,
    progress: Progress | None = None,
) -> PreTrainedTokenizerBase:
    """Return a new tokenizer of `size` tokens, or fewer if the texts have no more pairs to merge.

    Args:
        progress: called with bytes of the files before each row; merging pairs follows the last.

    Raises:
        ConfigError: C002, this kind of tokenizer cannot be trained, or `size` is too small.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    kind = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["type"]
    if kind != "BPE":  # the trainer of Unigram needs texts, and never ends without
        raise _untrainable(f"a tokenizer of the kind {kind}")
    least = _trained(tokenizer, [""], 0)
    if not {*ByteLevel.alphabet()} <= least.get_vocab().keys():
        raise _untrainable("a trained one has no token for every byte")
    if size < len(least):
        raise ConfigError(
            "C002",
            "the vocabulary has no room for the special tokens and every byte",
            where="--vocab",
            found=size,
            expected=f"at least {len(least):,}",
            remedy="such as --vocab 8192",
        )
    new = _trained(tokenizer, _texts(files, progress), size)
    _renumber_ends(new)
    return new


def _renumber_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokens that a trained tokenizer puts around a text their new ids; transformers does
    so where their template is not within a sequence, as Llama 3's is."""
    from tokenizers import Tokenizer

    made = json.loads(tokenizer.backend_tokenizer.to_str())
    ends = made["post_processor"] or {}
    for part in (ends, *ends.get("processors", ())):
        for token in part.get("special_tokens", {}).values():
            token["ids"] = tokenizer.convert_tokens_to_ids(token["tokens"])
    if ends:
        renumbered = Tokenizer.from_str(json.dumps(made)).post_processor
        tokenizer.backend_tokenizer.post_processor = renumbered


def bytes_per_token(tokenizer: PreTrainedTokenizerBase, files: Sequence[CheckedFile]) -> float:
    """Mean UTF-8 bytes of a token, over the first texts: about a million characters."""
    characters = size = tokens = 0
    for text in _texts(files):
        part = text[: _SAMPLE - characters]
        tokens += len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
        size += len(part.encode())
        characters += len(part)
        if characters == _SAMPLE:
            break
    return size / max(1, tokens)


def _trained(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], size: int
) -> PreTrainedTokenizerBase:
    train = tokenizer.train_new_from_iterator
    try:
        return cast("PreTrainedTokenizerBase", train(texts, vocab_size=size, show_progress=False))
    except VoxError:
        raise
    except Exception as error:  # the Rust tokenizers raise nothing narrower
        raise _untrainable(f"{type(error).__name__}: {error}") from error


def _texts(files: Sequence[CheckedFile], progress: Progress | None = None) -> Iterator[str]:
    rows, size = sum(file.rows for file in files), sum(file.lines.stat().st_size for file in files)
    lines = chain.from_iterable(read_lines(file.path, file.lines) for file in files)
    for done, (_, record) in enumerate(lines):
        if progress:
            progress("training a tokenizer", size * done // rows, size)
        if isinstance(record, Record):
            yield row_text(record)


def _untrainable(found: str) -> ConfigError:
    return ConfigError(
        "C002",
        "a tokenizer like this model's cannot be trained",
        where="--like",
        found=found,
        expected="a model with a byte-level BPE tokenizer, such as SmolLM2, Qwen3 or Llama 3",
        remedy="leave out --data to keep the model's own tokenizer, or name another model",
    )
