"""`vox export --to peft | mlx-lora`: there and back, its checks, and what it refuses.

Against plain PEFT and plain mlx-lm: tests/parity/test_interchange.py.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

import vox_cpu
from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.config import GenerateSettings, validate
from vox_core.contract import AdapterSpec, AdapterState, LoadJob, Model, RunContext
from vox_core.errors import (
    AdapterError,
    BackendError,
    ConfigError,
    OutputError,
    PluginError,
    ProofError,
    StorageError,
)
from vox_core.models import resolve
from vox_core.run.load import open_model
from vox_core.run.reference import resolve_reference
from vox_core.run.train import train
from vox_core.weights import WeightFolder, open_weights
from vox_export import convert as service
from vox_export import equivalence
from vox_export.convert import ConvertReport, convert
from vox_export.equivalence import compare_logits, require_same_state, require_same_update
from vox_export.requantise import requantise
from vox_export.settings import ExportSettings
from vox_testing.jobs import stirred
from vox_testing.llama import write_llama

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/vox_float64"
# Two float32 forwards of one formula (test_families.py); from float64, by no more.
FLOAT32 = 2e-5


def run_convert(source: object, to: str, **given: Any) -> ConvertReport:
    to = {"mlx": "mlx-lora"}.get(to, to)
    return convert(str(source), validate(ExportSettings, {"to": to, **given}))


@pytest.fixture(autouse=True)
def _only_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No logits, whatever is installed here, unless a test says which backends there are."""
    monkeypatch.setattr(service, "BACKENDS", {"peft": ("cpu",), "mlx": ("nothing",)})


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`adapters(base)` -> a PEFT folder with an effect, and what is in it."""

    def make(base: Path) -> tuple[Path, AdapterState]:
        from vox_core.contract import TrainState

        folder = tmp_path_factory.mktemp("adapter")
        weights = WeightFolder(base)
        modules = linear_modules(weights.tensors, "llama")
        spec = AdapterSpec("lora", 4, 8.0, 0.0, ("all-linear",))
        start = initial_adapter(select_targets(modules, ["all-linear"]), spec, 1, weights.read)
        state = stirred(TrainState(0, start)).adapter
        write_adapter(folder, state, base=str(base), modules=modules, dropout=0.1)
        return folder, state

    return make


def test_a_run_goes_to_mlx_and_back_and_is_the_same_files(settings, tiny, tmp_path) -> None:
    run = train(settings(tiny("llama"), method="rslora", dropout=0.1)).run
    there = run_convert(run, "mlx", out=tmp_path / "mlx")
    assert (there.source_format, there.format, there.modules) == ("peft", "mlx", 14)
    back = run_convert(tmp_path / "mlx", "peft", out=tmp_path / "peft")
    assert back.source_format == "mlx"
    assert back.update_error < 1e-12  # float64's own arithmetic
    for name in ("adapter_model.safetensors", "adapter_config.json", "vox_adapter.json"):
        assert (tmp_path / "peft" / name).read_bytes() == (run / name).read_bytes(), name
    assert (tmp_path / "mlx/tokenizer.json").is_file()


def test_a_card_says_how_the_adapter_is_used(tiny, adapters, tmp_path) -> None:
    source, _ = adapters(tiny("llama"))
    mlx = ModelCard.load(run_convert(source, "mlx", out=tmp_path / "mlx").out / "README.md")
    peft = ModelCard.load(run_convert(source, "peft", out=tmp_path / "peft").out / "README.md")
    for card, library in ((mlx, "mlx"), (peft, "peft")):
        assert (card.data.library_name, card.data.tags) == (library, ["lora", "vox"])
        assert "base_model" not in card.data.to_dict(), "a folder here"
        assert "# Adapter for base\n" in card.text and "    vox chat .\n" in card.text
        assert str(tiny("llama")) not in card.text
    assert "    mlx_lm.generate --model base --adapter-path . " in mlx.text
    assert '    model = AutoPeftModelForCausalLM.from_pretrained(".")\n' in peft.text
    base = replace(resolve(str(tiny("llama"))), id="small", hub="org/Small", licence="MIT")
    named = ModelCard(service._card("mlx", base))
    assert (named.data.base_model, named.data.license) == ("org/Small", "mit")
    assert "--model org/Small " in named.text


def test_an_mlx_folder_is_an_adapter_for_every_command(settings, tiny, tmp_path) -> None:
    run = train(settings(tiny("llama"))).run
    run_convert(run, "mlx", out=tmp_path / "mlx")
    require_same_state(
        resolve_reference(str(run)).adapter, resolve_reference(str(tmp_path / "mlx")).adapter
    )
    with open_model(str(tmp_path / "mlx"), GenerateSettings(max_tokens=2, backend="cpu")) as model:
        assert isinstance("".join(model.reply([{"role": "user", "content": "Hi"}])), str)


def test_the_base_is_named_with_model_where_the_folder_does_not(tiny, adapters, tmp_path) -> None:
    source, _ = adapters(tiny("llama"))
    mlx = run_convert(source, "mlx", out=tmp_path / "mlx").out
    told = json.loads((mlx / "adapter_config.json").read_text())
    del told["model"]
    (mlx / "adapter_config.json").write_text(json.dumps(told))
    with pytest.raises(AdapterError, match="does not say what its base model is"):
        run_convert(mlx, "peft", out=tmp_path / "peft")
    run_convert(mlx, "peft", out=tmp_path / "peft", model=str(tiny("llama")))
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["lora_dropout"] == 0.1


def test_another_base_is_refused(tiny, adapters, tmp_path) -> None:
    source, _ = adapters(tiny("llama"))
    mlx = run_convert(source, "mlx", out=tmp_path / "mlx").out
    with pytest.raises(AdapterError):
        run_convert(mlx, "peft", out=tmp_path / "peft", model=str(tiny("gpt2")))
    assert not (tmp_path / "peft").exists()


@pytest.mark.parametrize("given", [{"quant": "q8_0"}, {"max_kl": 0.1}])
def test_an_adapter_has_no_number_format(given) -> None:
    with pytest.raises(ConfigError) as caught:
        run_convert("x", "peft", **given)
    assert caught.value.code == "VOX-C004"


def test_a_base_model_and_an_existing_folder_are_refused(tiny, adapters, tmp_path) -> None:
    with pytest.raises(AdapterError, match="no adapter to export"):
        run_convert(tiny("llama"), "mlx", out=tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError):
        run_convert(adapters(tiny("llama"))[0], "mlx", out=tmp_path / "out")


def test_whole_tensors_are_noted(tiny, adapters, tmp_path) -> None:
    source, state = adapters(tiny("llama"))
    whole = {"lm_head.weight": np.ones((260, 32), np.float32)}
    modules = linear_modules(WeightFolder(tiny("llama")).tensors, "llama")
    write_adapter(source, replace(state, saved=whole), base=str(tiny("llama")), modules=modules)
    report = run_convert(source, "mlx", out=tmp_path / "mlx")
    assert report.saved == 1
    assert "lm_head.weight" in report.notes[0]
    run_convert(tmp_path / "mlx", "peft", out=tmp_path / "peft")
    require_same_state(replace(state, saved=whole), read_adapter(tmp_path / "peft"))


@pytest.fixture
def retold(tiny, tmp_path) -> Any:
    """`retold(key=value, ...)` -> a copy of a tiny Llama with other settings."""

    def make(**settings: Any) -> Path:
        folder = shutil.copytree(tiny("llama"), tmp_path / "retold")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        return folder

    return make


def notes(source: Path, base: Path, to: str) -> tuple[str, ...]:
    """Of a conversion; the base's settings do not touch the adapter."""
    return run_convert(source, to, out=base.parent / to, model=str(base)).notes


def test_what_mlx_lm_would_misread_in_the_base_is_told(adapters, tiny, retold) -> None:
    source, _ = adapters(tiny("llama"))
    base = retold(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    (note,) = notes(source, base, "mlx")
    assert "may compute another base" in note  # not with a default that is the same
    assert "rope_theta = 500000.0; vox's MLX backend corrects that" in note
    assert notes(base.parent / "mlx", base, "peft") == ()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "(dynamic in llama)"),
        (
            {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True},
            "computes another model beyond 128 tokens",
        ),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window = 128"),
    ],
)
def test_what_mlx_lm_cannot_compute_of_the_base_is_told(adapters, tiny, retold, said, told) -> None:
    source, _ = adapters(tiny("llama"))
    assert told in " ".join(notes(source, retold(**said), "mlx"))


def test_a_base_that_mlx_lm_reads_as_it_is_has_no_notes(adapters, tiny, retold) -> None:
    source, _ = adapters(tiny("llama"))
    base = retold(rope_parameters=None, rope_theta=5e5)
    assert notes(source, base, "mlx") == ()


# --- the updates ----------------------------------------------------------------------------------


def spoilt(state: AdapterState, **changes: Any) -> AdapterState:
    first = next(iter(state.modules))
    return replace(
        state, modules={**state.modules, first: replace(state.modules[first], **changes)}
    )


def test_an_update_that_differs_is_named(tiny, adapters) -> None:
    _, state = adapters(tiny("llama"))
    first = next(iter(state.modules))
    B_OR = state.modules[first].B_OR
    assert require_same_update(state, state) < 1e-12
    # The same update by other factors is the same update.
    doubled = spoilt(state, B_OR=2 * B_OR, A_RI=state.modules[first].A_RI / 2)
    assert require_same_update(state, doubled) < 1e-12
    for wrong in ({"B_OR": B_OR * np.float32(1.00001)}, {"alpha": 8.001}, {"B_OR": B_OR * np.nan}):
        with pytest.raises(ProofError) as caught:
            require_same_update(state, spoilt(state, **wrong))
        assert caught.value.code == "VOX-V003"
        assert [fault.split(":")[0] for fault in caught.value.faults] == [first]


def test_what_reads_back_otherwise_is_named(tiny, adapters) -> None:
    _, state = adapters(tiny("llama"))
    first = next(iter(state.modules))
    with pytest.raises(ProofError) as caught:
        require_same_state(state, spoilt(state, alpha=9.0))
    assert caught.value.faults == (f"{first}: alpha",)
    with pytest.raises(ProofError) as caught:
        require_same_state(state, replace(state, method="rslora"))
    assert caught.value.faults == ("the method",)


# --- the logits -----------------------------------------------------------------------------------


class Named:
    """A backend's object under a name, as `vox_core.host.load.Backend` calls it."""

    def __init__(self, name: str, backend: Any) -> None:
        self.id, self._backend = name, backend

    def load(self, job: LoadJob, context: RunContext) -> Model:
        # The example streams as the CPU does, in float32; whole it computes in float64.
        return self._backend.vox_load(replace(job, streamed=False), context)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Named:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from vox_float64 import backend

    return Named("float64", backend)


def test_two_backends_give_the_same_logits(tiny, adapters, float64, tmp_path) -> None:
    base = tiny("llama")
    _, state = adapters(base)
    cpu = Named("cpu", vox_cpu.backend)
    same = compare_logits(resolve(str(base)), (state, cpu), (state, float64), print)
    assert same.backends == ("cpu", "float64")
    assert 0 < same.relative < FLOAT32
    assert same.carried == pytest.approx(1, abs=1e-4)
    assert same.positions == 32


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_logits_without_the_adapters_effect_are_refused(
    tiny, adapters, float64, tmp_path, factor
) -> None:
    base = tiny("llama")
    _, state = adapters(base)
    wrong = replace(
        state, modules={p: replace(m, alpha=factor * m.alpha) for p, m in state.modules.items()}
    )
    cpu = Named("cpu", vox_cpu.backend)
    with pytest.raises(ProofError) as caught:
        compare_logits(resolve(str(base)), (state, cpu), (wrong, float64), print)
    assert caught.value.code == "VOX-V003"
    assert "on float64, held against cpu" in caught.value.found


def test_with_both_backends_installed_logits_are_compared(
    tiny, adapters, tmp_path, monkeypatch, float64
) -> None:
    chosen = {"cpu": Named("cpu", vox_cpu.backend), "mlx": float64}
    monkeypatch.setattr(
        equivalence, "choose", lambda request, seen: (chosen[request.explicit], None)
    )
    monkeypatch.setattr(service, "BACKENDS", {"peft": ("cpu",), "mlx": ("mlx",)})
    source, _ = adapters(tiny("llama"))
    same = run_convert(source, "mlx", out=tmp_path / "mlx").logits
    assert same.backends == ("cpu", "float64")
    assert same.relative < FLOAT32
    # From the other side it is the other that comes first.
    back = run_convert(tmp_path / "mlx", "peft", out=tmp_path / "peft").logits
    assert back.backends == ("float64", "cpu")


def test_a_base_in_mlxs_format_is_compared_on_its_dequantised_weights(
    tmp_path, monkeypatch, float64, adapters
) -> None:
    plain, base = write_llama(tmp_path / "plain", dtype="BF16"), tmp_path / "base"
    base.mkdir()
    requantise(plain, base, "affine4")
    seen: list[Path] = []

    def load(self: Named, job: LoadJob, context: RunContext) -> Model:
        seen.append(job.model)
        stored, copy = open_weights(base), WeightFolder(job.model)
        for name in stored.tensors:
            assert copy.read(name).tobytes() == stored.read(name).tobytes(), name
        return load_plain(self, job, context)

    load_plain = Named.load
    monkeypatch.setattr(Named, "load", load)
    chosen = {"cpu": Named("cpu", vox_cpu.backend), "mlx": float64}
    monkeypatch.setattr(
        equivalence, "choose", lambda request, seen: (chosen[request.explicit], None)
    )
    monkeypatch.setattr(service, "BACKENDS", {"peft": ("cpu",), "mlx": ("mlx",)})
    source, _ = adapters(plain)
    report = run_convert(source, "mlx", out=tmp_path / "mlx", model=str(base))
    assert report.logits is not None, report.why_no_logits
    assert report.logits.relative < FLOAT32
    assert len(seen) == 3
    assert not any(folder.exists() for folder in seen)


def test_without_room_for_that_copy_the_adapter_is_converted_all_the_same(
    tmp_path, monkeypatch, float64, adapters, tiny
) -> None:
    def full(*_: Any) -> Any:
        raise StorageError("S001", "no room", where="here", found="0 MB", remedy="")

    monkeypatch.setattr(service, "plain_copy", full)
    monkeypatch.setattr(equivalence, "choose", lambda request, seen: (float64, None))
    report = run_convert(adapters(tiny("llama"))[0], "mlx", out=tmp_path / "mlx")
    assert report.why_no_logits == "no room (here: 0 MB)"
    assert report.out.is_dir()


def test_with_one_backend_it_says_why_logits_were_not_compared(tiny, adapters, tmp_path) -> None:
    report = run_convert(adapters(tiny("llama"))[0], "mlx", out=tmp_path / "mlx")
    assert report.logits is None
    assert report.why_no_logits == "no usable backend for mlx (nothing: not installed)"
    again = run_convert(tmp_path / "mlx", "mlx", out=tmp_path / "again")
    assert "one format" in again.why_no_logits


def test_a_broken_backend_is_not_called_absent(tiny, adapters, tmp_path, monkeypatch) -> None:
    def choose(request: Any, seen: Any) -> Any:
        raise BackendError("B004", "it is broken", found="no such file", remedy="repair it")

    monkeypatch.setattr(equivalence, "choose", choose)
    report = run_convert(adapters(tiny("llama"))[0], "mlx", out=tmp_path / "mlx")
    assert "(cpu: no such file)" in report.why_no_logits


def test_a_backend_that_fails_on_this_model_is_told_of(
    tiny, adapters, tmp_path, monkeypatch
) -> None:
    def fail(*_: Any) -> Any:
        raise PluginError("X001", "a plugin failed", where="mlx", found="no such family", remedy="")

    cpu = Named("cpu", vox_cpu.backend)
    monkeypatch.setattr(equivalence, "choose", lambda request, seen: (cpu, None))
    monkeypatch.setattr(Named, "load", fail)
    report = run_convert(adapters(tiny("llama"))[0], "mlx", out=tmp_path / "mlx")
    assert report.why_no_logits == "a plugin failed (mlx: no such family)"
    assert report.out.is_dir()
