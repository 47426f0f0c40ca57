"""`vox export`: a merged model as GGUF, for Ollama or for mlx-lm, or the adapter alone as GGUF.

The result is compared with base + adapter before its folder appears (`quality.py`), and the
figures stand beside it in `proof.json`.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import gguf
import numpy as np

from vox_core.api.files import (
    atomic_folder,
    read_json,
    require_absent,
    require_space,
    write_json,
    write_text,
)
from vox_core.api.generating import prompt_text
from vox_core.api.models import (
    CARD,
    MergeSettings,
    ModelReference,
    Observe,
    Progress,
    ignore,
    merge,
    resolve_reference,
)
from vox_core.api.settings import did_you_mean
from vox_core.api.tokenizers import end_of_turn_ids, load_tokenizer, template_source
from vox_core.contract import AdapterState, Notice, WriteModelJob
from vox_core.errors import ConfigError, ModelError, ProofError
from vox_export import convert as adapters
from vox_export import llama_cpp, ollama, quality
from vox_export.child import end_child, full_config, without_torch
from vox_export.equivalence import require_same_update
from vox_export.gguf_file import (
    FORMATS,
    ModelFile,
    adapted_tensors,
    require_layout,
    require_lora,
    write_lora,
)
from vox_export.requantise import mlx_lm_config, requantise, require_quantisable
from vox_export.settings import ExportSettings
from vox_export.vocabulary import Vocabulary, read_vocabulary, vocabulary_in
from vox_formats.gguf_model import GgufSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vox_export.convert import ConvertReport


Write: TypeAlias = Callable[[str, Path], None]
"""Writes the model in a format of `FORMATS`."""
PROOF = "proof.json"
AUTO = ("mxfp4", "q4_0", "q4_k_m", "q4_1", "q5_0", "q5_k_m", "q5_1", "q6_k", "q8_0", "f16", "f32")
"""What `--quant auto` tries, by size where no K-quants are among them."""
MAX_KL = 0.02
_TEXTS = ("Hello, world! 12345 is a number.", "  Grüße aus Köln;\n\n\t東京は日本の首都です。 👍🏽")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export, with its comparison to base + adapter, or to the model.

    Args:
        file: the GGUF file; None where the folder itself is the model.
        quality: None where the figures of `vox merge` stand beside the model.
        notes: what the user should know of the result.
    """

    out: Path
    file: Path | None
    format: str
    quant: str
    base: str
    bytes: int
    quality: quality.Quality | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One export, resolved and checked.

    Args:
        reference: as the user named it.
        stops: tokens that end an answer.
    """

    reference: str
    settings: ExportSettings
    source: ModelReference
    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    observe: Observe

    @property
    def out(self) -> Path:
        return self.settings.folder(self.reference)

    @property
    def name(self) -> str:
        """Name of the model, and of its file: of the run's folder, or the last part of the id."""
        is_folder = self.source.adapter is not None
        return Path(self.reference if is_folder else self.source.base.id).resolve().name

    def report(
        self, name: str, quant: str, measured: quality.Quality | None, notes: Iterable[str]
    ) -> ExportReport:
        """Describe the result, which is in its place; `name` is that of its file."""
        to, base, file = str(self.settings.to), self.source.base.id, self.out / name
        size = file.stat().st_size
        return ExportReport(self.out, file, to, quant, base, size, measured, tuple(notes))

    def card(self, name: str, quant: str, measured: quality.Quality | None) -> str:
        """Return a model card for the file `name`, which the hub shows."""
        base, lora = self.source.base, self.settings.to == "gguf-lora"
        figures = f"; mean KL {measured.mean_kl:.2g} nats per token" if measured else ""
        what = "The adapter alone" if lora else quality.source_name(self.source).capitalize()
        base_id = f"; base: {base.id}" if self.source.adapter else ""
        return _CARD.format(
            head=base.card_head(base.hub, tags=["gguf", "vox"]),
            title=f"{self.name}, {quant}",
            what=f"{what} as GGUF, written by vox{base_id}{figures}",
            where=f"-m BASE.gguf --lora {name}" if lora else f"-m {name} --jinja",
        )


_CARD = """\
{head}
# {title}

{what}. `proof.json` has the comparison.

    llama-server {where}
"""


def export(
    reference: str,
    settings: ExportSettings,
    *,
    observe: Observe = ignore,
    progress: Progress | None = None,
) -> ExportReport | ConvertReport:
    """Export what `reference` names, and compare the result with base + adapter.

    Raises:
        InputError: bad input, found before any work.
        ProofError: V003 or V006, the result differs; no output is left.
        StorageError: the disk is full, or an I/O error; no output is left.
    """
    to = settings.to
    if to is None:
        raise _no_format(reference)
    if to in ("peft", "mlx-lora"):
        return adapters.convert(reference, settings, observe=observe, progress=progress)
    _require_quant(settings)
    if to == "mlx":
        return _export_mlx(reference, settings, observe, progress)
    source = resolve_reference(reference, base=settings.model, progress=progress)
    tokenizer = load_tokenizer(source.base.tokenizer)
    stops = end_of_turn_ids(tokenizer)
    job = Job(reference, settings, source, tokenizer, stops, observe)
    require_absent(job.out)
    return _export_lora(job) if to == "gguf-lora" else _export_gguf(job, progress)


# --- the whole model ------------------------------------------------------------------------------


def _export_gguf(job: Job, progress: Progress | None) -> ExportReport:
    quants = _candidates(job.settings)
    model = ModelFile(job.source, _written(quants[0]))
    vocabulary = _vocabulary(job, model)
    to_ollama = job.settings.to == "ollama"
    if to_ollama:  # refuses a template before any work
        ollama.modelfile(job.tokenizer, vocabulary, job.stops, "")
    else:
        require_same_template(job.tokenizer)
    _require_space(job, quants)
    with atomic_folder(job.out) as folder, tempfile.TemporaryDirectory(prefix="vox-") as scratch:
        reference = _reference(job, Path(scratch))

        def write(quant: str, path: Path) -> None:
            job.observe(Notice(f"writing {path.name}"))
            report = partial(progress, "writing") if progress else None
            ModelFile(job.source, quant).write(path, vocabulary, job.name, report)

        quants = _quantised(job, quants, folder, write)
        quant, path, measured, notes = _smallest(job, quants, vocabulary, reference, folder, write)
        write_json(folder / PROOF, {**asdict(measured), "quant": quant, "notes": notes})
        write_text(folder / CARD, job.card(path.name, quant, measured))
        if to_ollama:
            text = ollama.modelfile(job.tokenizer, vocabulary, job.stops, path.name)
            write_text(folder / "Modelfile", text)
    return job.report(path.name, quant, measured, notes)


def _quantised(job: Job, quants: list[str], folder: Path, write: Write) -> list[str]:
    """Write the K-quants among `quants`, by way of one file in float32.

    Their size depends on the model's widths: llama.cpp quantises some in more bits. Returns
    `quants` by the size of their files.
    """
    made = [quant for quant in quants if quant not in FORMATS]
    if not made:
        return quants
    write("f32", plain := folder / f"{job.name}.f32")
    head = plain.stat().st_size - ModelFile(job.source, "f32").nbytes
    sizes = {q: ModelFile(job.source, q).nbytes + head for q in quants if q in FORMATS}
    for quant in made:
        path = _path(job, folder, quant)
        job.observe(Notice(f"quantising to {path.name}"))
        llama_cpp.quantise(plain, path, quant, int(gguf.LlamaFileType[f"MOSTLY_{quant.upper()}"]))
        sizes[quant] = path.stat().st_size
    plain.unlink()
    return sorted(quants, key=sizes.__getitem__)


def _smallest(
    job: Job,
    quants: list[str],
    vocabulary: Vocabulary,
    reference: quality.Reference,
    folder: Path,
    write: Write,
) -> tuple[str, Path, quality.Quality, list[str]]:
    """Return the first of `quants` that is close enough, with its file, figures and notes."""
    too_far: list[str] = []
    for quant in quants:
        path, model = _path(job, folder, quant), ModelFile(job.source, _written(quant))
        if not path.exists():
            write(quant, path)
        quality.require_vocabulary(path, vocabulary, job.stops)
        job.observe(Notice(f"comparing {path.name} with {reference.source}"))
        with quality.scorer_of(path, model, reference) as scorer:
            measured = quality.measure(reference, scorer)
            notes = [*_notes(job, vocabulary, model), *_engine_notes(job, scorer)]
        shutil.rmtree(path.with_name(f"{path.stem}-dequantised"), ignore_errors=True)
        try:
            quality.require_kept(measured, quant, _max_kl(job.settings))
            break
        except ProofError:
            if quant == quants[-1]:
                raise
        too_far.append(f"{quant} {measured.mean_kl:.2g}")
        job.observe(Notice(f"{quant}: a mean KL of {measured.mean_kl:.2g} nats, too much"))
        path.unlink()
    for larger in quants[quants.index(quant) + 1 :]:
        _path(job, folder, larger).unlink(missing_ok=True)
    if too_far:
        notes.append(f"smaller files differ too much, with a mean KL of: {', '.join(too_far)}")
    return quant, path, measured, notes


def _path(job: Job, folder: Path, quant: str) -> Path:
    return folder / f"{job.name}-{quant}.gguf"


def _vocabulary(job: Job, model: ModelFile) -> Vocabulary:
    rows = model.targets["token_embd.weight"].shape[0]
    return read_vocabulary(job.tokenizer, rows, job.source.base.tokenizer)


def require_same_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template with another default than that of llama.cpp, which enables thinking.

    Raises:
        ModelError: M002.
    """
    if (source := template_source(tokenizer)) is None:
        return
    probe, rendered = copy(tokenizer), []
    for name in ("vox_unused", "enable_thinking"):
        probe.chat_template = f"{{% set {name} = true %}}{source}"
        rendered.append(prompt_text(probe, [{"role": "user", "content": "Hi"}])[0])
    if rendered[0] != rendered[1]:
        raise ModelError(
            "M002",
            "the chat template cannot be carried over exactly: llama.cpp enables thinking",
            where=tokenizer.name_or_path,
            found=f"with enable_thinking, the prompt ends in {rendered[1][-20:]!r}",
            expected=f"{rendered[0][-20:]!r}, as vox renders it without",
            remedy="train with another template (--template), or serve it with `vox serve`",
        )


def _reference(job: Job, scratch: Path) -> quality.Reference:
    job.observe(Notice(f"computing {quality.source_name(job.source)}"))
    return quality.make_reference(job.source, job.settings.backend, job.stops, scratch, job.observe)


def _notes(job: Job, vocabulary: Vocabulary, model: ModelFile) -> Iterator[str]:
    yield from vocabulary.notes
    yield from model.layout.notes(model.config)
    if model.coarse:
        yield (
            f"{len(model.coarse)} tensors are F16, since their rows are no multiple of a block of "
            f"{model.quant}: {model.coarse[0]}"
        )
    if job.source.quant != "none" and job.source.weights.quant == "none":
        yield (
            f"the run trained on the base quantised to {job.source.quant}, and the file has the "
            "unquantised base; for the other one, `vox merge --onto trained-base` first"
        )


def _engine_notes(job: Job, scorer: quality.Scorer) -> Iterator[str]:
    """List what llama.cpp tokenises or renders otherwise than vox."""
    if not isinstance(scorer, llama_cpp.LlamaCpp):
        return
    for text in _TEXTS:
        tokens = list(job.tokenizer(text, add_special_tokens=False)["input_ids"])
        if scorer.tokenise(text) != tokens:
            yield f"llama.cpp tokenises a text otherwise than vox: {text[:40]!r}"
    if template_source(job.tokenizer) is None:
        return
    turns = ("user", "Hi"), ("assistant", "Hello."), ("user", "Who are you?")
    messages = [{"role": role, "content": content} for role, content in turns]
    if scorer.render(messages) != prompt_text(job.tokenizer, messages)[0]:
        yield "llama.cpp renders this model's chat template otherwise than vox"


# --- the adapter alone ----------------------------------------------------------------------------


def _export_lora(job: Job) -> ExportReport:
    source = job.source
    if source.adapter is None:
        raise adapters.no_adapter(job.reference)
    layout, config = require_lora(source), full_config(source.base.path)
    with atomic_folder(job.out) as folder, tempfile.TemporaryDirectory(prefix="vox-") as scratch:
        path = folder / f"{job.name}-lora.gguf"
        write_lora(path, source, job.name)
        error = require_same_update(source.adapter, read_lora(path, source))
        measured = None
        if llama_cpp.engine():
            measured = _measure_lora(job, path, Path(scratch))
            quality.require_kept(measured, "f32", job.settings.max_kl)
        record = asdict(measured) if measured else {"engine": None}
        write_json(folder / PROOF, {**record, "update_error": error})
        write_text(folder / CARD, job.card(path.name, "f32", measured))
    return job.report(path.name, "f32", measured, layout.notes(config))


def _measure_lora(job: Job, lora: Path, scratch: Path) -> quality.Quality:
    """Compare base and adapter in llama.cpp with those of vox."""
    base = replace(job.source, adapter=None)
    model = ModelFile(base, "f32")
    reference = _reference(job, scratch)
    model.write(scratch / "base.gguf", _vocabulary(job, model), "base")
    with quality.scorer_of(scratch / "base.gguf", None, reference, lora) as scorer:
        return quality.measure(reference, scorer)


def read_lora(path: Path, source: ModelReference) -> AdapterState:
    """Read an adapter's GGUF file back, as llama.cpp applies it."""
    adapter, file = source.adapter, GgufSource(path)
    assert adapter is not None
    layout = require_layout(source, full_config(source.base.path))
    tensors = adapted_tensors(source, layout)
    alpha = float(file.value(gguf.Keys.Adapter.LORA_ALPHA))
    modules = {}
    for module, before in adapter.modules.items():
        ((name, change),) = tensors[module]
        A_RI, B_OR = (np.asarray(file.blocks(f"{name}.lora_{part}")[0]) for part in "ab")
        unpaired_OR = change.undo(B_OR) if change.rows(B_OR) is not B_OR else B_OR
        modules[module] = replace(before, A_RI=A_RI, B_OR=unpaired_OR, alpha=alpha)
    return AdapterState("lora", modules)


# --- mlx-lm ---------------------------------------------------------------------------------------


def _export_mlx(
    reference: str,
    settings: ExportSettings,
    observe: Observe,
    progress: Progress | None,
) -> ExportReport:
    """Merge into a folder that `mlx_lm.load` computes as vox does."""
    out = settings.folder(reference)
    quant = settings.quant or "none"
    source = resolve_reference(reference, base=settings.model, progress=progress)
    config = read_json(source.base.path / "config.json")
    written = mlx_lm_config(config, source.base.path)  # refuses what mlx-lm computes otherwise
    chosen = MergeSettings.model_validate(
        {"model": settings.model, "out": out, "quant": quant, "backend": settings.backend}
    )
    report = merge(reference, chosen, observe=observe, progress=progress)
    if quant == "none":
        write_json(out / "config.json", {**read_json(out / "config.json"), **written})
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return ExportReport(out, None, "mlx", quant, report.base, size, None, ())


# --- settings -------------------------------------------------------------------------------------

_MLX = ("none", "affine4", "affine8", "mxfp4", "nvfp4")


def _require_quant(settings: ExportSettings) -> None:
    """Refuse a number format that the format of the file does not have."""
    known: tuple[str, ...] = (*FORMATS, *llama_cpp.K_QUANTS, "auto")
    if settings.to == "gguf-lora":
        known = ("f32",)
    elif settings.to == "mlx":
        known = _MLX
    if settings.quant is not None and settings.quant not in known:
        raise ConfigError(
            "C002",
            f"--to {settings.to} has no such number format",
            where="--quant",
            found=settings.quant,
            expected=f"one of {', '.join(known)}",
            remedy=f"{did_you_mean(settings.quant.lower(), known)} choose one of them".lstrip(),
        )
    if settings.quant in llama_cpp.K_QUANTS and llama_cpp.quantiser() is None:
        raise ConfigError(
            "C009",
            "K-quants need llama.cpp's quantiser",
            where=f"--quant {settings.quant}",
            found="neither llama-quantize on the PATH nor a libllama",
            expected="one of them; vox itself writes " + ", ".join(FORMATS),
            remedy="install llama.cpp (brew install llama.cpp, or a release from "
            "https://github.com/ggml-org/llama.cpp/releases), or choose --quant q5_1",
        )
    if settings.max_kl is not None and settings.to == "mlx":
        raise ConfigError(
            "C004",
            "--max-kl is for GGUF files",
            where="--to mlx",
            remedy="leave out --max-kl; `vox merge` prints how far the result is from its source",
        )


def _candidates(settings: ExportSettings) -> list[str]:
    if settings.quant != "auto":
        return [settings.quant or "f16"]
    usable = (*FORMATS, *(llama_cpp.K_QUANTS if llama_cpp.quantiser() else ()))
    return [quant for quant in AUTO if quant in usable]


def _max_kl(settings: ExportSettings) -> float:
    return settings.max_kl or (MAX_KL if settings.quant == "auto" else math.inf)


def _written(quant: str) -> str:
    """Return what vox writes itself, for llama.cpp to quantise where that is a K-quant."""
    return quant if quant in FORMATS else "f32"


def _require_space(job: Job, quants: list[str]) -> None:
    """Refuse a disk without room for the file, and what lies beside it meanwhile."""
    plain = ModelFile(job.source, "f32").nbytes
    written = [quant for quant in quants if quant in FORMATS]
    needed = ModelFile(job.source, written[-1]).nbytes if written else 0
    if not llama_cpp.engine():
        needed += plain
    if made := len(quants) - len(written):  # each is smaller than a file in Q8_0
        needed = max(needed, plain + made * ModelFile(job.source, "q8_0").nbytes)
    require_space(job.out, needed, "the exported model")


def _no_format(reference: str) -> ConfigError:
    return ConfigError(
        "C004",
        "the format to write is missing",
        where="--to",
        expected="gguf, gguf-lora, ollama, mlx, mlx-lora or peft",
        remedy=f"vox export {reference} --to gguf",
    )


# --- for other plugins ----------------------------------------------------------------------------

_STORED = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_DTYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def write_model(job: WriteModelJob) -> None:
    """Write a model in one of MLX's quantisations or as GGUF, or an adapter alone as GGUF.

    With `job.out` None, check only. Who has a GGUF file written compares what its engine computes.
    """
    if job.format not in ("gguf", "gguf-lora"):
        if job.out is None:
            require_quantisable(job.model, job.format)
        else:
            requantise(job.model, job.out, job.format)
        return
    try:
        _write_gguf_model(job)
    finally:
        end_child()


def _write_gguf_model(job: WriteModelJob) -> None:
    source = (
        resolve_reference(str(job.model))
        if job.adapter is None
        else resolve_reference(str(job.adapter), base=str(job.model))
    )
    if job.format == "gguf-lora":
        require_lora(source)
        if job.out:
            write_lora(job.out / "adapter.gguf", source, source.base.id)
        return
    embedding = next(iter(source.weights.tensors.values())).dtype
    quant = _DTYPES[job.dtype] if job.dtype else _STORED.get(embedding, "f32")
    write_gguf(source, quant, job.out / "model.gguf" if job.out else None)


def write_gguf(source: ModelReference, quant: str, path: Path | None) -> None:
    """Write a GGUF file without comparing it; with `path` None, check only.

    This process imports neither torch nor transformers: a child reads configuration and tokenizer.
    """
    model = ModelFile(source, quant)
    rows = model.targets["token_embd.weight"].shape[0]
    vocabulary = without_torch(vocabulary_in, source.base.tokenizer, rows)
    end_child()
    if path:
        model.write(path, vocabulary, source.base.id)
