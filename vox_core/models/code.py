"""Where the JSON files of a model name code, or files to be read in the place of others.

Libraries run what such keys name, some unless they are told not to, some whatever they are told.
vox reads the files first, and a folder that has one of these keys is not handed on.

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
from typing import Any

_NAMES_CODE = frozenset({"auto_map", "custom_pipelines", "custom_generate", "model_file"})
_NAMES_FILES = frozenset(
    {
        "configuration_files",
        "transformers_weights",
        "fast_tokenizer_files",
        "gguf_file",
        "init_inputs",
    }
)
_KERNELS = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_BUILT_IN = (None, "eager", "sdpa")
# Paths of the machine that saved a tokenizer, which many repositories have: nothing reads them from
# `tokenizer_config.json`. From `special_tokens_map.json` they would be read.
_UNREAD = frozenset({"tokenizer_file", "special_tokens_map_file", "added_tokens_file"})
_SPECIAL_TOKENS = "special_tokens_map.json"


def code_keys(value: Any, file: str = "config.json") -> Iterator[str]:
    """Where in a parsed JSON document code or files are named, as dotted paths.

    Args:
        value: nested no more deeply than `bounded_json.MAX_DEPTH`.
        file: the name of the file that it is from.
    """
    return _walk(value, "", file)


def _walk(value: Any, path: str, file: str) -> Iterator[str]:
    children: Iterable[tuple[object, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        if isinstance(key, str) and _names(key, child, file):
            yield f"{path}{key}"
        yield from _walk(child, f"{path}{key}.", file)


def _names(key: str, value: Any, file: str) -> bool:
    """Whether this entry names code or a file."""
    if key in _NAMES_CODE:
        return True
    if key in _NAMES_FILES:
        return value not in (None, [], "")
    if _KERNELS.fullmatch(key):
        return not all(one in _BUILT_IN for one in _leaves(value))
    if key == "quantization_config" or (key.endswith("_file") and not _is_unread(key, file)):
        return any(isinstance(one, str) and _is_path(one) for one in _leaves(value))
    return False


def _is_unread(key: str, file: str) -> bool:
    return key in _UNREAD and file != _SPECIAL_TOKENS


def _is_path(text: str) -> bool:
    return bool(set(text) & set("/\\\0")) or text in (".", "..")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _leaves(child)
    else:
        yield value
