"""A model's tokenizer with another chat template: `--template`, or the one of an adapter's folder.

The tokenizer's files are copied into a folder of the cache with the template among them, once for
each template. Whoever reads or digests a tokenizer does so by folder, and so has the template too:
the tokens' cache, the contract, the run folder, chat and merge.

`chatml` and `alpaca` are written for the tokenizer: they begin with its bos token where it puts one
before a text, and a turn ends with a special token that it has. A model's stop tokens
(`generation_config.json`) gain the one that ends a turn.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vox_core import bounded_json, files
from vox_core.cache import CACHE_VERSION, cached
from vox_core.data.template import ChatTemplate, TemplateFault
from vox_core.data.tokenizer import (
    GENERATION_CONFIG,
    end_of_turn_ids,
    files_of,
    load_tokenizer,
    special_ids,
)
from vox_core.errors import ConfigError, DataError
from vox_core.hashes import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        _require_template(ChatTemplate(written, tokenizer.special_tokens_map), template)
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


def _require_template(written: ChatTemplate, named: str | Path) -> None:
    """Only its syntax counts: what it refuses, rows will show."""
    try:
        written.render([{"role": "user", "content": "x"}])
    except TemplateFault as fault:
        if not fault.syntax:
            return
        raise DataError(
            "D005",
            "the chat template cannot be compiled",
            where=f"--template {named}",
            found=fault,
            expected="a Jinja template of messages",
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
