"""Make a model with random weights like another model, or smaller.

The folder has Hugging Face's layout: `vox train --model OUT --method full` trains it, and every
other command takes it, too. Weights are float32, drawn as transformers initialises the family. The
same seed and versions of torch and transformers draw the same weights.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.api.files import atomic_folder, require_absent, require_space
from vox_core.api.models import CONFIG, LocalModel, Progress, resolve, resolve_reference
from vox_core.api.rows import STEP, CheckedFile, check_files, find_split
from vox_core.api.runs import RunFolder
from vox_core.api.tokenizers import load_tokenizer
from vox_core.errors import ConfigError, DataError, StorageError
from vox_scratch.tokenizer import bytes_per_token, trained_like

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

LIKE = "smollm2-135m"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OURS = {"architectures", "model_type", "dtype", "transformers_version", "vocab_size", *_TOKENS}
"""Keys of a configuration that no value may be given for; some are the tokenizer's."""
_SIZES = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "max_position_embeddings",
}  # fmt: skip
"""Names that most families have, and others under names of their own."""


@dataclass(frozen=True, slots=True)
class NewModel:
    """A model that was written.

    Args:
        like: id of the model whose architecture it has.
        parameters: all of them; a tied head counts once.
        vocabulary: tokens of the tokenizer.
        bytes_per_token: of a tokenizer that was trained, on its data; None for the model's own.
    """

    path: Path
    like: str
    model_type: str
    parameters: int
    vocabulary: int
    bytes_per_token: float | None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"path": str(self.path)}


def new_model(
    out: Path,
    *,
    like: str = LIKE,
    values: Mapping[str, Any] | None = None,
    data: Sequence[Path] = (),
    vocab: int | None = None,
    seed: int = 42,
    progress: Progress | None = None,
) -> NewModel:
    """Write a model with random weights, and without a chat template, to the new folder `out`.

    Args:
        like: a model or a run, whose configuration and tokenizer are taken; a model needs no
            weights.
        values: other values of its configuration, such as `num_hidden_layers`.
        data: files and folders to train a tokenizer on.
        vocab: tokens of that tokenizer; by default as many as the model's has.
        progress: called with bytes of downloads, and of the data while the tokenizer is trained.

    Raises:
        ConfigError: C002, an unknown or impossible value, or no causal language model; C004,
            `vocab` without `data`.
        DataError: a data file cannot be used.
        ModelError, AdapterError: `like` cannot be used.
        OutputError: `out` exists, or cannot be written.
        StorageError: the disk is full, or an I/O error.
    """
    require_absent(out, "give another OUT")
    if vocab is not None and not data:
        what, remedy = "--vocab without data to train a tokenizer on", "name files with --data"
        raise ConfigError("C004", what, where="--vocab", found=vocab, remedy=remedy)
    base = _imitated(like, progress)
    config = _configuration(base.path, values or {})
    tokenizer = load_tokenizer(base.path)
    density = None
    if data:
        files = _sound(find_split(data)[0])
        tokenizer = trained_like(tokenizer, files, vocab or len(tokenizer), progress)
        config.vocab_size = len(tokenizer)
        for name in _TOKENS:
            setattr(config, name, getattr(tokenizer, name))
        density = bytes_per_token(tokenizer, files)
    tokenizer.chat_template = None
    model = _initialised(config, seed)
    try:
        require_space(out, 4 * model.num_parameters(), "the model")
    except StorageError as error:
        raise error.but(remedy="free space on that disk, or give another OUT") from error
    with atomic_folder(out) as folder, _without_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):  # which safetensors writes for the owner alone
            weights.chmod((folder / "config.json").stat().st_mode)
    count = model.num_parameters()
    return NewModel(out, base.id, config.model_type, count, len(tokenizer), density)


def _imitated(like: str, progress: Progress | None) -> LocalModel:
    """The model that `like` names; an adapter stands for its base."""
    if (Path(like) / CONFIG).is_file():
        return resolve_reference(like, adapter="none", progress=progress).base
    return resolve(str(RunFolder(Path(like)).model or like), progress=progress, weights=False)


def _sound(paths: Sequence[Path]) -> list[CheckedFile]:
    """Check the rows of the files (D003 for malformed ones)."""
    try:
        return check_files(paths)
    except DataError as error:
        if error.code != "VOX-D003":
            raise
        here = "correct these lines, or name other files with --data"  # none is left out
        raise error.but(remedy=error.remedy.replace(STEP, here)) from error


def _configuration(folder: Path, values: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of the language model in `folder`, with `values` in place of its own."""
    from transformers import AutoConfig, PreTrainedConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    except Exception as error:  # each family checks its configuration in its own way
        raise _impossible(error) from error
    # Such as GPT-2's, whose `num_hidden_layers` is `n_layer`.
    common = {name: usual for usual, name in config.attribute_map.items() if usual in _SIZES}
    known = {common.get(name, name): value for name, value in config.to_dict().items()}
    known.pop("quantization_config", None)
    settable = {name: value for name, value in known.items() if name not in _OURS}
    settable |= {name: known[usual] for name, usual in common.items() if usual in known}
    of_all = {*PreTrainedConfig().to_dict()}
    values = {
        common.get(name, name): _fitting(name, value, settable, of_all)
        for name, value in values.items()
    }
    layers: Any = known.get("num_hidden_layers")
    wanted = values.get("num_hidden_layers", layers)
    try:
        for name, value in known.items():
            if isinstance(value, list) and len(value) == layers and name not in _TOKENS:
                known[name] = [value[n % layers] for n in range(wanted)]  # such as `layer_types`
        sizes = _in_proportion(known, values)
        changed: PreTrainedConfig = type(config).from_dict(deepcopy({**known, **sizes, **values}))
    except Exception as error:
        raise _impossible(error) from error
    return changed


def _in_proportion(known: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that go with another width or number of heads: heads of the same size, about as many
    queries to a key, feed-forward layers in proportion, up to a multiple of 64.

    Raises:
        ValueError: no number of such heads fits.
    """
    decide = {"hidden_size", "num_attention_heads"}
    if not decide & values.keys() or not decide <= known.keys():
        return {}
    ratio = values.get("hidden_size", known["hidden_size"]) / known["hidden_size"]
    size = known["hidden_size"] // known["num_attention_heads"]
    heads = values.get("num_attention_heads", known["num_attention_heads"] * ratio)
    if heads != int(heads):
        raise ValueError(
            f"hidden_size is no multiple of {size}, the size of a head: set num_attention_heads"
        )
    sizes = {"num_attention_heads": int(heads)}
    if keys := known.get("num_key_value_heads"):
        sizes["num_key_value_heads"] = math.gcd(int(heads), max(1, round(keys * ratio)))
    if inner := known.get("intermediate_size"):
        sizes["intermediate_size"] = math.ceil(inner * ratio / 64) * 64 if ratio != 1 else inner
    return sizes


def _fitting(name: str, value: Any, known: Mapping[str, Any], common: set[str]) -> Any:
    """The value as the configuration has it (C002 unless it has one of that name and type).

    Args:
        common: names of every family, which an error does not list.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "use one of these names"
        if name == "vocab_size":
            remedy = "train a tokenizer of that size, with --data and --vocab"
        raise ConfigError(
            "C002",
            "the model's configuration has no such value",
            where=f"--set {name}",
            expected=", ".join(sorted({*known} - common)),
            remedy=remedy,
        )
    was = known[name]
    if isinstance(was, float) and type(value) is int:
        return float(value)
    is_size = type(was) is type(value) is int and was > 0
    if (None not in (was, value) and type(value) is not type(was)) or (is_size and value < 1):
        raise ConfigError(
            "C002",
            "a value of the configuration is not like the model's",
            where=f"--set {name}",
            found=json.dumps(value),
            expected=f"a value such as {json.dumps(was)}, which the model has",
            remedy="correct the value",
        )
    return value


def _initialised(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Draw the weights of a model, and compute the logits of two tokens with them."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make = AutoModelForCausalLM.from_config
            model: PreTrainedModel = make(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            logits = model(torch.tensor([[0, 1]])).logits
    except Exception as error:  # what does not fit together fails anywhere
        raise _impossible(error) from error
    sizes = [*(part.numel() for part in model.parameters()), config.num_hidden_layers]
    if not logits.isfinite().all() or not all(sizes):
        raise _impossible(ValueError("no layers, an empty weight, or logits that are not finite"))
    return model


def _impossible(error: Exception) -> ConfigError:
    said = " ".join(map(str.strip, str(error).splitlines()))
    return ConfigError(
        "C002",
        "this configuration does not make a model",
        where="--like and --set",
        found=said or type(error).__name__,
        expected="a causal language model of transformers, and sizes that fit together",
        remedy="correct the values, or name another model",
    )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal, and its setting as it was."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
