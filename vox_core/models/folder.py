"""Check that a folder is a usable model and names no code to run.

It needs a `config.json` with a model type, valid safetensors, and a tokenizer.
No link may lead out of it, and no JSON file in it may name code, or files to read instead of
others. Libraries run or read these by default or always, so vox refuses a folder with one of these
keys (`code_keys`):

    auto_map, custom_pipelines, custom_generate   transformers: classes in the repository
    model_file                                    mlx-lm: a module in the repository
    *attn_implementation*, *experts_implementation*
                                                  transformers: kernels of the hub, which are code;
                                                  `eager` and `sdpa` are torch's own
    configuration_files                           transformers: read instead of config.json
    transformers_weights                          transformers: loaded instead of the weights
    fast_tokenizer_files, gguf_file, init_inputs  transformers: read instead of tokenizer.json
    *_file with a path                            transformers: vocabularies, wherever they lie
    quantization_config with a path               kernels, calibration data
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vox_core import bounded_json, files
from vox_core.errors import ModelError, command
from vox_core.weights import WeightFolder

_MAY_NAME_CODE = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
ADAPTER = "adapter_config.json"
_MODEL_TYPE = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


def check_folder(folder: Path, weights: bool = True) -> tuple[str, str | None]:
    """Check `folder` without reading weights; return its model type and its card's licence.

    Raises:
        ModelError: M002 with every fault of the folder; M004 if it names code; M003 or M005 for
            its weights.
    """
    with files.storage_errors(folder):
        strays = files.strays(folder)
    if strays:
        raise _leads_out(folder, strays)
    parsed, faults = _parse(folder)
    model_type = parsed.get("config.json", {}).get("model_type")
    is_named = isinstance(model_type, str) and _MODEL_TYPE.fullmatch(model_type)
    if "config.json" in parsed and not is_named:
        faults.append("config.json: found no model_type, expected the name of an architecture")
    if (folder / ADAPTER).exists():  # transformers would load the base named in it instead
        faults.append(
            f"{ADAPTER}: found beside a model, expected an adapter to have its own folder"
        )
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        faults.append("the tokenizer: expected tokenizer.json, tokenizer.model or vocab.json")
    if faults:
        what = "the model folder is not one that vox can use"
        remedy = "give a folder in Hugging Face's layout, as save_pretrained writes it"
        raise ModelError("M002", what, where=folder, faults=faults, remedy=remedy)
    if named := [f"{file}: {key}" for file, doc in parsed.items() for key in code_keys(doc, file)]:
        raise _needs_code(folder, named)
    if weights:
        WeightFolder(folder)
    return str(model_type), _card_licence(folder)


def _card_licence(folder: Path) -> str | None:
    """Return `license:` from the front matter of the model card, or None."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    with files.storage_errors(card):
        text = card.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    found = front and re.search(r"^license:[ \t]*[\"']?([^\s\"']+)", front[1], re.MULTILINE)
    return found[1] if found else None


def _parse(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the folder's JSON files, parsed, and their faults."""
    parsed: dict[str, dict[str, Any]] = {}
    there = [name for name in _MAY_NAME_CODE if (folder / name).is_file()]
    faults = [] if "config.json" in there else ["config.json: missing"]
    for name in there:
        try:
            with files.storage_errors(folder / name):
                document = bounded_json.read(folder / name)
        except bounded_json.JsonFault as error:
            faults.append(f"{name}: not JSON: {error}")
            continue
        if isinstance(document, dict):
            parsed[name] = document
        else:
            faults.append(f"{name}: found {type(document).__name__}, expected an object")
    return parsed, faults


def _leads_out(folder: Path, strays: list[str]) -> ModelError:
    return ModelError(
        "M002",
        "the model folder has links that lead out of it",
        where=folder,
        faults=strays,
        expected="files, or links within the folder, or a snapshot in the hub's cache",
        remedy=f"if you made the links, copy what they lead to: {command('cp', '-rL', folder)} NEW",
    )


def _needs_code(folder: Path, named: list[str]) -> ModelError:
    return ModelError(
        "M004",
        "the model brings code of its own, or names files to be read in the place of its own; "
        "vox never runs code from a model repository",
        where=folder,
        found=", ".join(named),
        expected="a model whose architecture is part of transformers",
        remedy="choose a repository of this model without custom code; if transformers has its "
        "architecture built in, a copy of the folder without these keys is one",
    )


# --- code -----------------------------------------------------------------------------------------

_NAMES_CODE = frozenset({"auto_map", "custom_pipelines", "custom_generate", "model_file"})
_NAMES_FILES = frozenset({"configuration_files", "transformers_weights", "fast_tokenizer_files"})
_NAMES_FILES |= {"gguf_file", "init_inputs"}
_KERNELS = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_PATH = re.compile(r"[/\\\0]|^\.\.?$")
_BUILT_IN = (None, "eager", "sdpa")
# Paths of the machine that saved a tokenizer, which many repositories have: nothing reads them from
# `tokenizer_config.json`. From `special_tokens_map.json` they would be read.
_UNREAD = frozenset({"tokenizer_file", "special_tokens_map_file", "added_tokens_file"})


def code_keys(value: Any, file: str = "config.json", path: str = "") -> Iterator[str]:
    """Return the dotted paths in a JSON document that name code or files.

    Args:
        value: nested at most `bounded_json.MAX_DEPTH` deep.
        path: of `value` in it, with a dot at its end.
    """
    children: Iterable[tuple[object, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        if isinstance(key, str) and _names(key, child, file):
            yield f"{path}{key}"
        yield from code_keys(child, file, f"{path}{key}.")


def _names(key: str, value: Any, file: str) -> bool:
    if key in _NAMES_CODE:
        return True
    if key in _NAMES_FILES:
        return value not in (None, [], "")
    if _KERNELS.fullmatch(key):
        return not all(one in _BUILT_IN for one in _leaves(value))
    is_unread = key in _UNREAD and file != "special_tokens_map.json"
    if key == "quantization_config" or (key.endswith("_file") and not is_unread):
        return any(isinstance(one, str) and _PATH.search(one) for one in _leaves(value))
    return False


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _leaves(child)
    else:
        yield value
