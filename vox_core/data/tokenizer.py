"""A model folder's tokenizer, the tokens that end a turn, and texts as tokens with offsets.

`transformers` reads the tokenizer: from the folder alone, without code from a repository, and
without torch. Only its fast (Rust) tokenizers are used, because masks are built from the character
offsets that only they report.

An end-of-turn token is what a model must produce to stop. It is found by rendering a probe
conversation: the first special token after what the assistant said in it is the template's. The
tokenizer's own end-of-sequence token and those of `generation_config.json` stop generation as well,
so they count too.

Shape legend: T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vox_core import bounded_json
from vox_core.data.template import ChatTemplate, TemplateFault, takes_too_much
from vox_core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
_ASSISTANT, _USER = "7305918264", "4182650937"
_SUFFIXES = {".jinja", ".json", ".model", ".tiktoken", ".txt"}


def files_of(folder: Path) -> list[Path]:
    """Files of a model folder that a tokenizer may be made from."""
    places = (folder.glob("*"), folder.glob("additional_chat_templates/*"))
    return sorted(
        path for place in places for path in place if path.suffix in _SUFFIXES and path.is_file()
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`.

    Raises:
        DataError: D005, it cannot be loaded, or it is not a fast one.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the Rust tokenizers raise nothing narrower
        raise _unusable(folder, _first_line(error)) from error
    if not tokenizer.is_fast:
        raise _unusable(folder, f"{type(tokenizer).__name__}, which reports no character offsets")
    return cast("PreTrainedTokenizerBase", tokenizer)


def template_source(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> str | None:
    """The chat template; among several the one that transformers takes, which is `tool_use` for
    conversations with tools, and `default`. None without one."""
    named: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(named, dict):
        return (tools and named.get("tool_use")) or named.get("default") or None
    return named or None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that stand for themselves and not for text."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end generation: the tokenizer's `eos_token`, and the special ones among those
    that the `generation_config.json` of its folder names.

    Raises:
        DataError: D005, that file is not JSON.
    """
    named = _generation_eos(Path(tokenizer.name_or_path)) if tokenizer.name_or_path else set()
    if (eos := tokenizer.eos_token_id) is not None:
        named.add(cast(int, eos))
    return special_ids(tokenizer) & named


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end what the assistant says: the chat template's, and `stop_ids`.

    A template may end a turn in the middle of a conversation otherwise than the last one (gpt-oss
    does). The token that follows a middle turn counts if another special token follows before the
    user's words; a single one may as well be the header of the user's turn.
    """
    found = stop_ids(tokenizer)
    for source in {template_source(tokenizer), template_source(tokenizer, tools=True)} - {None}:
        middle, last = _after_assistant(tokenizer, cast(str, source))
        found |= set(last[:1]) | set(middle[:1] if len(middle) > 1 else ())
    return found


def _after_assistant(
    tokenizer: PreTrainedTokenizerBase, source: str
) -> tuple[list[int], list[int]]:
    """Special tokens between an assistant's words and the next user's, and after the last words."""
    turn = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}]
    try:
        text = ChatTemplate(source, tokenizer.special_tokens_map).render(turn + turn)
    except TemplateFault as fault:
        if fault.too_much:
            raise takes_too_much(fault, tokenizer.name_or_path) from fault
        return [], []  # the rows will say what the template does not like
    parts = text.split(_ASSISTANT)
    if len(parts) != 3:
        return [], []
    return (
        _specials(tokenizer, parts[1].partition(_USER)[0]),
        _specials(tokenizer, parts[2]),
    )


def _specials(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    special = special_ids(tokenizer)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [id for id in ids if id in special]


def _generation_eos(folder: Path) -> set[int]:
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return set()
    try:
        config: dict[str, Any] = bounded_json.read(path)
    except ValueError as error:
        raise _unusable(path, _first_line(error)) from error
    eos = config.get("eos_token_id")
    return {eos} if isinstance(eos, int) else set(eos or ())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _unusable(where: Path, found: str) -> DataError:
    return DataError(
        "D005",
        "the model's tokenizer cannot be used",
        where=where,
        found=found,
        expected="a fast tokenizer (tokenizer.json) that needs no code of its own",
        remedy="use a model folder with a tokenizer.json, or make one with save_pretrained",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a text.

    Args:
        ids_T: int32.
        begins_T, stops_T: int64 offsets of each token's characters. Where a tokenizer trims
            whitespace from its offsets, a token begins where the one before it ends.
    """

    ids_T: NDArray[np.int32]
    begins_T: NDArray[np.int64]
    stops_T: NDArray[np.int64]


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """Tokenise some texts together, without special tokens around them."""
    batch = tokenizer(
        list(texts),
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    ids = cast("list[list[int]]", batch["input_ids"])
    offsets = cast("list[list[tuple[int, int]]]", batch["offset_mapping"])
    return [_tokens(*each) for each in zip(ids, offsets, strict=True)]


def _tokens(ids: list[int], offsets: list[tuple[int, int]]) -> Tokens:
    begins_T, stops_T = np.array(offsets, np.int64).reshape(-1, 2).T
    reached_T = np.maximum.accumulate(np.concatenate([[0], stops_T])[:-1])
    # A token really begins where the one before it ends; the last step is for broken tokenizers.
    begins_T = np.maximum.accumulate(np.minimum(begins_T, reached_T))
    return Tokens(np.array(ids, np.int32), begins_T, stops_T)
