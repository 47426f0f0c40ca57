"""Train a tokenizer like a model's on the texts of data files.

It has the model's special tokens, normaliser and rules for cutting text into words; its vocabulary
is new. A kind of tokenizer that would lose characters which the data lacks is refused: a vocabulary
needs a token for every byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from vox_core.api.rows import CheckedFile, Record, read_lines, row_text
from vox_core.errors import ConfigError, VoxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "Ein Café: 12,50 €\n\tdef f(x): return x  # naïve 你好 שלום 🙂 \x7f"
"""Characters of one to four bytes, a tab and repeated spaces."""
_SAMPLE = 1_000_000


def trained_like(
    tokenizer: PreTrainedTokenizerBase, files: Sequence[CheckedFile], size: int
) -> PreTrainedTokenizerBase:
    """Return a new tokenizer of `size` tokens, or fewer if the texts have no more pairs to merge.

    Raises:
        ConfigError: C002, this kind of tokenizer cannot be trained, or `size` is too small.
    """
    least = _trained(tokenizer, [""], 0)
    try:
        loses = _keeps(tokenizer, _PROBE) and not _keeps(least, _PROBE)
    except Exception as error:  # as where neither a byte nor `<unk>` is in the vocabulary
        raise _untrainable(str(error)) from error
    if loses:
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
    return _trained(tokenizer, _texts(files), size)


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


def _texts(files: Sequence[CheckedFile]) -> Iterator[str]:
    for file in files:
        for _, record in read_lines(file.path, file.lines):
            if isinstance(record, Record):
                yield row_text(record)


def _keeps(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return bool(tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text)


def _untrainable(found: str) -> ConfigError:
    return ConfigError(
        "C002",
        "a tokenizer like this model's cannot be trained",
        where="--like",
        found=found,
        expected="a model with a byte-level tokenizer, such as SmolLM2, Qwen3 or Llama 3",
        remedy="leave out --data to keep the model's own tokenizer, or name another model",
    )
