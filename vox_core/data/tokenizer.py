"""A model folder's tokenizer, the tokens that end a turn, and texts as tokens with offsets.

`transformers` reads the tokenizer: from the folder alone, without code from a repository, and
without torch. Only its fast (Rust) tokenizers are used, because masks are built from the character
offsets that only they report.

An end-of-turn token is what a model must produce to stop. It is found by rendering a probe
conversation: the first special token after what the assistant said in it is the template's. The
tokenizer's own end-of-sequence token and those of `generation_config.json` stop generation as well,
so they count too.

`templated` gives a tokenizer another chat template: `--template`, or the one of an adapter's
folder. The tokenizer's files are copied into a folder of the cache with the template among them,
once for each template. Whoever reads or digests a tokenizer does so by folder, and so has the
template too: the tokens' cache, the contract, the run folder, chat and merge.

`chatml` and `alpaca` are written for the tokenizer: they begin with its bos token where it puts one
before a text, and a turn ends with a special token that it has. A model's stop tokens
(`generation_config.json`) gain the one that ends a turn.

Shape legend: T tokens of a text.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from vox_core import bounded_json, files
from vox_core.cache import CACHE_VERSION, cached, file_sha256
from vox_core.data.template import ChatTemplate, TemplateFault
from vox_core.errors import ConfigError, DataError

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
    """The tokenizer in `folder` (D005 if it cannot be loaded, or is not a fast one)."""
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


def chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> ChatTemplate:
    """A chat template with the tokenizer's special tokens."""
    where = f"the chat template of {tokenizer.name_or_path}"
    return ChatTemplate(source, tokenizer.special_tokens_map, where)


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
        text = chat_template(tokenizer, source).render(turn + turn)
    except TemplateFault:
        return [], []  # the rows will say what the template does not like
    parts = text.split(_ASSISTANT)
    if len(parts) != 3:
        return [], []
    return (_specials(tokenizer, parts[1].partition(_USER)[0]), _specials(tokenizer, parts[2]))


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


TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_FOLDER, _ENTRY = "templates", "vox_template.json"
_IM_END = "<|im_end|>"

_CHATML = (
    "{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + {end} + '\\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
)
# The sentence is Stanford Alpaca's (github.com/tatsu-lab/stanford_alpaca).
_ALPACA = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n\\n' }}{% set turns = messages[1:] %}"
    "{% else %}"
    "{{ 'Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\\n\\n' }}{% set turns = messages %}"
    "{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}"
    "{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}"
    "{% else %}"
    "{{ raise_exception('the alpaca template has no place for the role ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)


class Templated(NamedTuple):
    """A folder with a tokenizer and its template, and what a person should know of it."""

    folder: Path
    notes: tuple[str, ...]


def templated(model: Path, template: str | Path) -> Templated:
    """The tokenizer in the folder `model` with a template in place of its own.

    Args:
        template: `chatml`, `alpaca`, or a Jinja file.

    Raises:
        ConfigError: C002, there is no such template.
        DataError: D005, the template cannot be compiled, or the tokenizer not be used.
        OutputError: the cache cannot be written.
        StorageError: the disk is full, or an I/O error.
    """
    named = _NAMED.get(str(template))
    source = "" if named else _read(Path(template))
    own = model / TEMPLATE
    if not named and own.is_file() and own.read_text("utf-8", errors="replace") == source:
        return Templated(model, ())
    decides = [str(template) if named else source, CACHE_VERSION]
    decides += [f"{path.name} {file_sha256(path)}" for path in files_of(model)]
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def make(folder: Path) -> None:
        tokenizer = load_tokenizer(model)
        written, notes = named(tokenizer) if named else (source, [])
        where = f"--template {template}"
        _require_template(ChatTemplate(written, tokenizer.special_tokens_map, where), where)
        tokenizer.chat_template = written
        _write(folder, model, tokenizer)
        files.write_json(folder / _ENTRY, {"notes": notes})

    found = cached(_FOLDER, key, make, _recall)
    if found.fault:
        raise found.fault
    return found.value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "C002",
            "there is no such chat template",
            where=f"--template {path}",
            found=getattr(error, "strerror", None) or error,
            expected=f"{', '.join(_NAMED)}, or a Jinja file",
            remedy="correct the name, or the path of the file",
        ) from error


def _recall(folder: Path, _owner: object) -> Templated | None:
    try:
        return Templated(folder, tuple(json.loads((folder / _ENTRY).read_bytes())["notes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, model: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The files of the tokenizer in `model`, with the template that it has now."""
    for path in files_of(model):
        if path.parent == model and not path.name.startswith("chat_template."):
            shutil.copyfile(path, folder / path.name)
    if (folder / _CONFIG).is_file():
        config = bounded_json.read(folder / _CONFIG)
        config.pop("chat_template", None)
        files.write_json(folder / _CONFIG, config)
    files.write_text(folder / TEMPLATE, str(tokenizer.chat_template))
    generation = folder / GENERATION_CONFIG
    config = bounded_json.read(generation) if generation.is_file() else {}
    files.write_json(generation, {**config, "eos_token_id": sorted(end_of_turn_ids(tokenizer))})


def _require_template(written: ChatTemplate, where: str) -> None:
    """Only its syntax counts: what it refuses, rows will show."""
    try:
        written.render([{"role": "user", "content": "x"}])
    except TemplateFault as fault:
        if not fault.syntax:
            return
        raise DataError(
            "D005",
            "the chat template cannot be compiled",
            where=where,
            found=fault,
            remedy="correct the template",
        ) from fault


def _chatml(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str]]:
    names = tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
    if _IM_END in names:
        return _bos(tokenizer) + _CHATML.format(end=f"'{_IM_END}'"), []
    note = f"chatml: a turn ends with {_eos(tokenizer)}, because the tokenizer has no {_IM_END}"
    return _bos(tokenizer) + _CHATML.format(end="eos_token"), [note]


def _alpaca(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str]]:
    _eos(tokenizer)
    return _bos(tokenizer) + _ALPACA, []


_NAMED = {"chatml": _chatml, "alpaca": _alpaca}


def _bos(tokenizer: PreTrainedTokenizerBase) -> str:
    first: list[int] = tokenizer("a")["input_ids"][:1]
    return "{{ bos_token }}" if first == [tokenizer.bos_token_id] else ""


def _eos(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.eos_token:
        return str(tokenizer.eos_token)
    raise DataError(
        "D005",
        "the tokenizer has no token that could end a turn",
        where=tokenizer.name_or_path,
        expected=f"an eos_token, or {_IM_END}",
        remedy="use a model whose tokenizer has one, or a template that ends turns with another "
        "special token",
    )
