"""`vox export --to peft | mlx-lora`: convert an adapter from one format to another, and verify it.

The result is read back twice before the folder appears: by vox, which must give the source bit for
bit, and as the format's own tool reads it, which must give the source's updates up to one rounding
to float32. If backends of both formats are installed, their logits are compared, too, on a
dequantised copy if the base is stored quantised. The base's weights are read for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vox_core.api.files import (
    atomic_folder,
    read_json,
    require_absent,
    write_bytes,
    write_json,
    write_text,
)
from vox_core.api.models import (
    CARD,
    CONFIG,
    MANIFEST,
    TOKENIZER_FILES,
    LocalModel,
    ModelReference,
    Observe,
    Progress,
    Seen,
    base_name,
    ignore,
    is_mlx_folder,
    plain_copy,
    read_adapter_folder,
    resolve_reference,
    write_adapter,
    write_tensors,
)
from vox_core.contract import AdapterState, Notice
from vox_core.errors import (
    AdapterError,
    ConfigError,
    InputError,
    PluginError,
    StorageError,
    command,
)
from vox_export.equivalence import (
    SameLogits,
    compare_logits,
    require_same_state,
    require_same_update,
    usable_backend,
)
from vox_export.requantise import shorter_window
from vox_export.settings import ExportSettings
from vox_formats import FormatError, mlx_adapter
from vox_formats.mlx_model import misread, window

Format: TypeAlias = Literal["peft", "mlx"]

# Backends that compute with the library of a format, the preferred one first.
BACKENDS: dict[Format, tuple[str, ...]] = {"peft": ("cuda", "cpu"), "mlx": ("mlx",)}


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The converted adapter and the results of its verification.

    Args:
        update_error: the largest error of a module's update; see equivalence.py.
        logits: None if they were not compared; `why_no_logits` then says why.
        notes: what the user should know of the result.
    """

    out: Path
    source_format: Format
    format: Format
    base: str
    modules: int
    saved: int
    update_error: float
    logits: SameLogits | None
    why_no_logits: str | None
    notes: tuple[str, ...]


def convert(
    reference: str,
    settings: ExportSettings,
    *,
    observe: Observe = ignore,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the adapter of `reference` in another format, and verify it.

    Raises:
        InputError: bad input, found before any work.
        ProofError: V003, the result differs from the source; no output is left.
        StorageError: an I/O error; no output is left.
    """
    to: Format = "peft" if settings.to == "peft" else "mlx"
    if settings.quant or settings.max_kl:
        raise _no_numbers(settings)
    out = settings.folder(reference)
    require_absent(out)
    source = resolve_reference(reference, base=settings.model, progress=progress)
    if source.adapter is None:
        raise no_adapter(reference)
    origin = source.folder or Path(reference)
    source_format: Format = "mlx" if is_mlx_folder(origin) else "peft"
    with atomic_folder(out) as folder:
        _write(to, folder, source.adapter, source, _dropout(origin))
        for name in (MANIFEST, *TOKENIZER_FILES):
            if (file := origin / name).is_file():
                write_bytes(folder / name, file.read_bytes())
        require_same_state(source.adapter, read_adapter_folder(folder, source.mlx_base))
        written = read_adapter_folder(folder, source.mlx_base, literal=True)
        update_error = require_same_update(source.adapter, written)
        logits = _logits(source, source.adapter, written, (source_format, to), folder, observe)
        write_text(folder / CARD, _card(to, source.base))
    return ConvertReport(
        out=out,
        source_format=source_format,
        format=to,
        base=source.base.id,
        modules=len(source.adapter.modules),
        saved=len(source.adapter.saved),
        update_error=update_error,
        logits=logits if isinstance(logits, SameLogits) else None,
        why_no_logits=logits if isinstance(logits, str) else None,
        notes=tuple(_notes(source, source.adapter)) if to == "mlx" else (),
    )


_CARD = """\
{head}
# Adapter for {base}

Converted by vox for {tool}.

## Use it

    vox chat .

or with {tool}:

{use}
"""

_USE: dict[Format, str] = {
    "peft": """\
    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained(".")""",
    "mlx": "    mlx_lm.generate --model {base} --adapter-path . --prompt Hello",
}


def _card(to: Format, base: LocalModel) -> str:
    library, tool = ("peft", "PEFT") if to == "peft" else ("mlx", "mlx-lm")
    return _CARD.format(
        head=base.card_head(base.hub, library_name=library, tags=["lora", "vox"]),
        base=base.id,
        tool=tool,
        use=_USE[to].format(base=base.hub or base.id),
    )


def _write(
    to: Format, folder: Path, adapter: AdapterState, source: ModelReference, dropout: float
) -> None:
    name = base_name(source.base)
    if to == "peft":
        write_adapter(folder, adapter, base=name, modules=source.modules, dropout=dropout)
    else:
        write_mlx_adapter(folder, adapter, source.mlx_base, model=name, dropout=dropout)


def write_mlx_adapter(
    folder: Path,
    state: AdapterState,
    base: mlx_adapter.MlxBase,
    *,
    model: str,
    dropout: float = 0.0,
) -> None:
    """Write an adapter folder for `mlx_lm.load(..., adapter_path=folder)`.

    Args:
        model: the value of `model` in the configuration.

    Raises:
        AdapterError: A003, listing every module and tensor that mlx-lm's model does not have.
    """
    updates = {
        path: mlx_adapter.Update(module.A_RI, module.B_OR, module.alpha, module.magnitude_O)
        for path, module in state.modules.items()
    }
    adapter = mlx_adapter.Adapter(state.method, updates, state.saved)
    try:
        made = mlx_adapter.to_mlx(adapter, base, model=model, dropout=dropout)
    except FormatError as error:
        raise AdapterError(
            "A003",
            where=folder,
            **error.facts,
            remedy="train it again without these, or use it with PEFT; nothing was written",
        ) from error
    write_tensors(folder / mlx_adapter.WEIGHTS, made.tensors, "mlx")
    if made.exact:
        write_tensors(folder / mlx_adapter.EXACT, made.exact, "mlx")
    write_json(folder / mlx_adapter.CONFIG, made.config)


def _logits(
    source: ModelReference,
    adapter: AdapterState,
    written: AdapterState,
    formats: tuple[Format, Format],
    folder: Path,
    observe: Observe,
) -> SameLogits | str:
    """Compare the logits, or return why they were not compared.

    A base stored quantised is dequantised into a copy beside `folder`, which both backends load,
    whatever quantisations they support.
    """
    if formats[0] == formats[1]:
        return "both are of one format, and there is one way to compute them"
    seen = Seen()
    found = [usable_backend(BACKENDS[one], source.base, adapter.method, seen) for one in formats]
    missing = [
        f"no usable backend for {one} ({reason})"
        for one, reason in zip(formats, found, strict=True)
        if isinstance(reason, str)
    ]
    first, second = found
    if isinstance(first, str) or isinstance(second, str):
        return "; ".join(missing)
    observe(Notice(f"comparing the logits of {first.id} and {second.id}"))
    sides = (adapter, first), (written, second)
    try:
        with plain_copy(source.weights, folder) as plain:
            return compare_logits(replace(source.base, path=plain), *sides, observe)
    # A backend cannot load this model, or the disk is too full for the copy.
    except (InputError, PluginError, StorageError) as error:
        return f"{error.what} ({error.where}: {error.found})"


def _dropout(folder: Path) -> float:
    """Return the source's dropout, for further training."""
    if is_mlx_folder(folder):
        return mlx_adapter.parse_config(read_json(folder / mlx_adapter.CONFIG)).dropout
    config: dict[str, Any] = read_json(folder / CONFIG)
    return float(config.get("lora_dropout") or 0.0)


def _notes(source: ModelReference, adapter: AdapterState) -> Iterator[str]:
    """List what mlx-lm without vox would not load or compute differently."""
    if adapter.modules and adapter.saved:
        yield (
            f"mlx-lm 0.32 does not load an adapter with whole tensors ({', '.join(adapter.saved)}) "
            "and says so; vox does"
        )
    config = read_json(source.base.path / "config.json")
    try:
        settings = misread(config)
    except FormatError as error:
        yield f"mlx-lm and vox's MLX backend cannot compute this base: {error.what} ({error.found})"
        return
    if settings:
        yield (
            "mlx-lm by itself may compute another base model than this one: most of its families "
            f"have defaults instead of {', '.join(settings)}; vox's MLX backend corrects that"
        )
    if size := shorter_window(window(config), config):
        yield (
            "mlx-lm leaves out this base's sliding window, and computes another model beyond "
            f"{size} tokens; vox's MLX backend refuses documents that are longer"
        )


def _no_numbers(settings: ExportSettings) -> ConfigError:
    return ConfigError(
        "C004",
        "an adapter is stored in float32",
        where="--quant" if settings.quant else "--max-kl",
        found=f"--to {settings.to}",
        remedy="leave it out, or export the merged model with --to gguf or mlx",
    )


def no_adapter(reference: str) -> AdapterError:
    """Return the error for a reference that is no adapter, where only an adapter is exported."""
    return AdapterError(
        "A001",
        "there is no adapter to export",
        where=reference,
        found="a model",
        expected="a run folder of `vox train`, or a folder saved by PEFT or mlx-lm",
        remedy=f"{command('vox', 'export', reference, '--to', 'gguf')} exports the model",
    )
