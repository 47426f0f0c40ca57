"""From a GGUF file to a folder that transformers, PEFT and mlx-lm load.

Everything that stands against it is found before the first byte is written: unknown architecture,
missing metadata, tensors too few or too many, types that cannot be dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vox_core import files
from vox_core.gguf.families import FAMILIES, Family
from vox_core.gguf.source import GgufSource, unconvertible
from vox_core.gguf.tokenizer import build_tokenizer, tokenizer_config, tokenizer_kind
from vox_core.weights import WEIGHTS, write_safetensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

BytesDone: TypeAlias = Callable[[int, int], None]
"""Called with bytes written and bytes to write."""

_REQUIRED = (
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
)
_HUB = "use the model's Hugging Face repository instead of the GGUF file"
_BF16 = 2


def convert_gguf(path: Path, folder: Path, *, progress: BytesDone | None = None) -> None:
    """Convert `path` into a new Hugging Face `folder`, which appears whole or not at all.

    Raises:
        ModelError: M008, with every reason why the file cannot be converted.
        OutputError: `folder` exists, or cannot be made.
        StorageError: the disk is full, or an I/O error.
    """
    source = GgufSource(path)
    family = _family(source)
    config, names = _plan(source, family)
    tokenizer = build_tokenizer(source)
    with files.atomic_folder(folder) as new:
        files.write_json(new / "config.json", config)
        files.write_json(new / "generation_config.json", _generation_config(source, config))
        files.write_text(new / "tokenizer.json", tokenizer.to_str())
        files.write_json(
            new / "tokenizer_config.json",
            tokenizer_config(source, config["max_position_embeddings"]),
        )
        if template := source.value("tokenizer.chat_template"):
            files.write_text(new / "chat_template.jinja", template)
        files.write_text(new / "README.md", _card(source))
        specs = {ours: ("BF16", source.tensors[theirs]) for theirs, ours in names.items()}
        tensors = ((ours, family.read(source, theirs, config)) for theirs, ours in names.items())
        write_safetensors(new / WEIGHTS, specs, _reported(tensors, specs, progress))


def _family(source: GgufSource) -> Family:
    arch = source.value("general.architecture")
    if (family := FAMILIES.get(str(arch))) is None:
        raise unconvertible(
            source.path,
            found=f"architecture {arch}",
            expected=f"one of {', '.join(FAMILIES)}",
            remedy=_HUB,
        )
    return family


def _plan(source: GgufSource, family: Family) -> tuple[dict[str, Any], dict[str, str]]:
    """The config, and the tensors: name in GGUF -> name in transformers.

    Raises:
        ModelError: M008, with all that is missing, surplus or unsupported.
    """
    faults = _metadata_faults(source, family) + source.unreadable()
    if not faults:
        config = family.config(source)
        names = family.names(source, config["num_hidden_layers"])
        faults = _tensor_faults(source, names)
        if not faults:
            return config, names
    raise unconvertible(source.path, faults=faults, remedy=_HUB)


def _metadata_faults(source: GgufSource, family: Family) -> list[str]:
    arch = source.value("general.architecture")
    faults = [
        f"metadata {arch}.{key}: found {source.value(f'{arch}.{key}')!r}, expected a number above 0"
        for key in _REQUIRED
        if not _is_positive(source.value(f"{arch}.{key}"))
    ]
    if not isinstance(source.value("tokenizer.ggml.tokens"), list):
        faults.append("metadata tokenizer.ggml.tokens: missing")
    if (kind := tokenizer_kind(source)) not in family.tokenizers:
        known = ", ".join("/".join(pair) for pair in sorted(family.tokenizers))
        faults.append(f"tokenizer: found {'/'.join(kind)}, expected one of {known}")
    scaling = f"{arch}.rope.scaling.type"
    if (found := source.value(scaling, "none")) not in ("none", "linear"):
        faults.append(f"metadata {scaling}: found {found}, expected none or linear")
    if "token_embd.weight" not in source.tensors:
        faults.append("tensor token_embd.weight: missing")
    return faults


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _tensor_faults(source: GgufSource, names: Mapping[str, str]) -> list[str]:
    missing = [f"tensor {name}: missing" for name in names if name not in source.tensors]
    surplus = [f"tensor {name}: not supported" for name in source.tensors if name not in names]
    return missing + surplus


def _generation_config(source: GgufSource, config: Mapping[str, Any]) -> dict[str, Any]:
    """The special ids; where an end of turn differs from the end of text, both end the answer."""
    ids = {key: config[key] for key in config if key.endswith("_token_id")}
    turn = source.value("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != ids.get("eos_token_id"):
        ids["eos_token_id"] = [ids["eos_token_id"], turn] if "eos_token_id" in ids else turn
    return ids


def _card(source: GgufSource) -> str:
    licence = source.value("general.license")
    front = f"---\nlicense: {licence}\n---\n\n" if licence else ""
    name = source.value("general.name", source.path.stem)
    return f"{front}# {name}\n\nConverted to bfloat16 by vox from `{source.path.name}`.\n"


def _reported(
    tensors: Iterator[tuple[str, Array]],
    specs: Mapping[str, tuple[str, tuple[int, ...]]],
    progress: BytesDone | None,
) -> Iterator[tuple[str, Array]]:
    total = sum(math.prod(shape) for _, shape in specs.values()) * _BF16
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += tensor.nbytes
        if progress:
            progress(done, total)
