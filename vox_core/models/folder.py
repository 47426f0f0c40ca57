"""Is this folder a model that vox can use?

It needs a `config.json` with a model type, safetensors that hold what they claim, and a tokenizer.
No JSON file in it may name code to be run, and no link may lead out of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_core import bounded_json, files, links
from vox_core.errors import ModelError, command
from vox_core.models.code import code_keys
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
_ADAPTER = "adapter_config.json"
_MODEL_TYPE = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """What a checked folder says of itself; `licence` is the model card's."""

    model_type: str
    licence: str | None


def check_folder(folder: Path) -> FolderFacts:
    """Check `folder` without reading weights.

    Raises:
        ModelError: M002 with every fault of the folder; M004 if it names code; M003 or M005 for
            its weights.
    """
    with files.storage_errors(folder):
        strays = links.strays(folder)
    if strays:
        raise _leads_out(folder, strays)
    parsed, faults = _parse(folder)
    config = parsed.get("config.json", {})
    if "config.json" in parsed and not _is_model_type(config.get("model_type")):
        faults.append("config.json: found no model_type, expected the name of an architecture")
    if (folder / _ADAPTER).exists():  # transformers would load the base that it names instead
        faults.append(
            f"{_ADAPTER}: found beside a model, expected an adapter to have its own folder"
        )
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        faults.append("the tokenizer: expected tokenizer.json, tokenizer.model or vocab.json")
    if faults:
        raise ModelError(
            "M002",
            "the model folder is not one that vox can use",
            where=folder,
            faults=faults,
            remedy="give a folder in Hugging Face's layout, as save_pretrained writes it",
        )
    if named := [f"{file}: {key}" for file, doc in parsed.items() for key in code_keys(doc, file)]:
        raise _needs_code(folder, named)
    WeightFolder(folder)
    return FolderFacts(config["model_type"], card_licence(folder))


def card_licence(folder: Path) -> str | None:
    """`license:` in the front matter of the model card, if there is one."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    with files.storage_errors(card):
        text = card.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    found = front and re.search(r"^license:[ \t]*[\"']?([^\s\"']+)", front[1], re.MULTILINE)
    return found[1] if found else None


def _parse(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The JSON files that are there, and what is wrong with them."""
    parsed: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    for name in _MAY_NAME_CODE:
        if not (folder / name).is_file():
            if name == "config.json":
                faults.append("config.json: missing")
            continue
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


def _is_model_type(value: object) -> bool:
    return isinstance(value, str) and _MODEL_TYPE.fullmatch(value) is not None


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
