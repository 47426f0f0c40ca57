"""Quantised bases: what a run records of them, what is refused, and what a merge makes of them.

The CPU backend quantises nothing. Where a run must have been quantised, it is let train as if it
did, or its manifest is made to say so: what is tested here is what the core does with that.
"""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.run.lines import read
from vox_core import host
from vox_core.adapter.targets import format_of, quantised_modules
from vox_core.config import GenerateSettings, MergeSettings, TrainSettings, validate
from vox_core.errors import BackendError, PlanError, StorageError
from vox_core.host import Seen
from vox_core.run import load
from vox_core.run.hf_checkpoint import trained_weights
from vox_core.run.load import open_model
from vox_core.run.merge import merge
from vox_core.run.reference import resolve_reference
from vox_core.run.train import train
from vox_core.weights import WeightFolder, open_weights
from vox_export import requantise
from vox_formats.quant import CODECS, MLX_FORMATS
from vox_testing.llama import write_llama
from vox_torch import base as engine
from vox_torch import load as loader
from vox_torch import train as trainer

usage = namedtuple("usage", "total used free")
PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def _the_cpu_alone(monkeypatch):
    """Another backend that is installed here may have the quantisations."""
    others = {entry.name for entry in metadata.entry_points(group="vox_core.plugins")} - {
        "cpu",
        "export",
    }
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", ",".join(sorted(others)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama whose widths are multiples of 64, in bfloat16."""
    return write_llama(tmp_path_factory.mktemp("llama") / "base", dtype="BF16")


@pytest.fixture
def lenient(monkeypatch):
    """Let the CPU backend pass for one that has every quantisation, though it trains on the plain
    weights; gives what was asked of it."""
    asked = []

    def load_base(folder, dtype, device, _quant):
        return engine.load_base(folder, dtype, device)

    real = Seen.select

    def select(seen, request):
        asked.append(request)
        return real(seen, replace(request, quant=None))

    monkeypatch.setattr(Seen, "select", select)
    monkeypatch.setattr(trainer, "load_base", load_base)
    monkeypatch.setattr(loader, "load_base", load_base)
    return asked


@pytest.fixture
def quantised(base, tmp_path):
    """The base as a folder in MLX's format."""
    folder = tmp_path / "quantised"
    folder.mkdir()
    requantise.requantise(base, folder, "affine4")
    return folder


def trained_on(report, **said):
    """The run, as a backend with the quantisation would have left it."""
    manifest = report.run / "vox_adapter.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **said}))
    return str(report.run)


def test_a_run_says_what_its_base_is_quantised_to(base, settings, lenient):
    report = train(settings(base, quant="affine4", dtype="bf16", max_steps=2))
    assert {request.quant for request in lenient} == {"affine4"}
    plan = json.loads((report.run / "plan.json").read_text())
    manifest = json.loads((report.run / "vox_adapter.json").read_text())
    assert plan["contract"]["quant"] == manifest["quant"] == "affine4"
    (start,) = [
        line for line in read(report.run / "telemetry.jsonl") if line["event"] == "run_start"
    ]
    assert start["quant"] == "affine4"
    card = (report.run / "README.md").read_text()
    assert "| quantisation of the base | affine4 |" in card
    assert "vox merge . --onto trained-base" in card
    assert resolve_reference(str(report.run)).quant == "affine4"


def test_a_resumed_run_keeps_its_quantisation(base, settings, lenient):
    report = train(settings(base, quant="affine8", max_steps=2))
    for name in ("vox_adapter.json", "adapter_config.json", "adapter_model.safetensors"):
        (report.run / name).unlink()
    with pytest.raises(PlanError) as caught:
        train(validate(TrainSettings, {"resume": report.run, "quant": "affine4"}))
    assert caught.value.faults == ("--quant: 'affine8' when it began, 'affine4' now",)
    train(validate(TrainSettings, {"resume": report.run}))
    assert resolve_reference(str(report.run)).quant == "affine8"


def test_a_backend_without_the_quantisation_is_refused_by_name(base, settings):
    with pytest.raises(BackendError) as caught:
        train(settings(base, quant="affine4"))
    has = "none, nf4, nf4-embeddings, nf4-single, int8"
    assert any(f"quantisation affine4 (has: {has})" in fault for fault in caught.value.faults)


def test_widths_that_the_groups_do_not_divide_are_refused_with_their_modules(
    tiny, settings, lenient
):
    with pytest.raises(PlanError) as caught:
        train(settings(tiny("llama"), quant="affine4"))
    assert caught.value.faults[0] == (
        "--quant affine4: model.layers.0.mlp.gate_proj: "
        "32 input features are not divisible by its group of 64"
    )
    assert not any("lm_head" in fault or "down_proj" in fault for fault in caught.value.faults)


def test_a_quantised_module_cannot_be_trained_whole_but_the_head_can(base, settings, lenient):
    with pytest.raises(PlanError) as caught:
        train(settings(base, quant="nvfp4", modules_to_save=["layers.0.self_attn.q_proj"]))
    assert caught.value.faults == (
        "--modules-to-save model.layers.0.self_attn.q_proj: "
        "quantised weights (nvfp4) cannot be trained",
    )
    train(settings(base, quant="nvfp4", modules_to_save=["lm_head"], max_steps=1))


def test_doras_magnitudes_are_the_norms_of_the_quantised_weights(base, settings, lenient):
    report = train(settings(base, quant="affine4", method="dora", max_steps=1, lr=1e-30))
    found = resolve_reference(str(report.run)).adapter.modules[PROJECTION.removesuffix(".weight")]
    W_OI = WeightFolder(base).read(PROJECTION)
    left_OI = MLX_FORMATS["affine4"].round_trip(W_OI, np.dtype(np.float32))
    assert np.allclose(found.magnitude_O, np.linalg.norm(left_OI, axis=1), rtol=1e-6)
    plain_O = np.linalg.norm(W_OI.astype(np.float32), axis=1)
    assert not np.allclose(found.magnitude_O, plain_O, rtol=1e-4)


@pytest.mark.parametrize(("asked", "loaded"), [(None, "affine4"), ("none", "none")])
def test_a_run_speaks_as_it_was_trained_unless_told_otherwise(
    base, settings, monkeypatch, asked, loaded
):
    run = trained_on(train(settings(base, max_steps=1)), quant="affine4")
    jobs = []
    real, selection = host.choose(host.Request("load"))

    class Recording(type(real)):
        def load(self, job, context):
            jobs.append(job)
            return real.load(replace(job, quant="none"), context)

    backend = Recording(real.found, real.manager)
    monkeypatch.setattr(load, "choose_for", lambda *_: (backend, selection))
    for adapter in (None, "none"):
        with open_model(run, GenerateSettings(quant=asked, adapter=adapter)):
            assert jobs[-1].quant == loaded


class TestMerging:
    @pytest.fixture
    def run(self, base, settings):
        report = train(settings(base, dtype="bf16"))
        return trained_on(report, quant="affine4")

    def test_onto_the_base_is_the_plain_merge_and_tells_the_noise(
        self, base, run, settings, tmp_path
    ):
        proof = merge(run, MergeSettings(out=tmp_path / "merged")).proof
        assert proof.relative <= proof.tolerance
        assert proof.from_trained > 2 * proof.relative
        trained_on_report = json.loads((tmp_path / "merged" / "vox_merge.json").read_text())
        assert trained_on_report["proof"]["from_trained"] == proof.from_trained
        manifest = tmp_path / "run" / "vox_adapter.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "quant": "none"}))
        plain = merge(run, MergeSettings(out=tmp_path / "plain"))
        assert plain.proof.from_trained is None
        ours, theirs = WeightFolder(tmp_path / "merged"), WeightFolder(tmp_path / "plain")
        for name in theirs.tensors:
            assert ours.read(name).tobytes() == theirs.read(name).tobytes()

    def test_onto_the_trained_base_is_what_was_trained(self, base, run, tmp_path):
        out = tmp_path / "merged"
        proof = merge(run, MergeSettings(out=out, onto="trained-base")).proof
        assert proof.from_trained == proof.relative <= proof.tolerance
        update = resolve_reference(run).adapter.modules[PROJECTION.removesuffix(".weight")]
        W_OI = MLX_FORMATS["affine4"].round_trip(WeightFolder(base).read(PROJECTION))
        expected = W_OI.astype(np.float32) + 2 * update.B_OR @ update.A_RI
        merged = WeightFolder(out).read(PROJECTION).astype(np.float32)
        assert np.allclose(merged, expected, rtol=2**-8, atol=1e-6)
        untouched = ("lm_head.weight", "model.embed_tokens.weight")
        for name in untouched:
            assert WeightFolder(out).read(name).tobytes() == WeightFolder(base).read(name).tobytes()
        left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")]
        assert not left

    def test_a_run_in_a_finer_dtype_than_the_files_is_held_against_what_it_saw(
        self, base, settings, tmp_path
    ):
        run = trained_on(train(settings(base, dtype="fp32")), quant="affine4")
        out = tmp_path / "merged"
        proof = merge(run, MergeSettings(out=out, onto="trained-base")).proof
        assert {info.dtype for info in WeightFolder(out).tensors.values()} == {"BF16"}
        assert 0 < proof.from_trained <= proof.tolerance
        assert proof.from_trained != proof.relative
        seen = trained_weights(resolve_reference(run)).read(PROJECTION)
        W_OI = WeightFolder(base).read(PROJECTION)
        assert seen.dtype == np.float32
        expected = MLX_FORMATS["affine4"].round_trip(W_OI, np.dtype(np.float32))
        assert seen.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("quant", ["nf4", "nf4-embeddings", "nf4-single", "int8"])
    def test_what_another_machine_quantised_is_merged_onto_as_well(
        self, base, run, tmp_path, quant
    ):
        """None of them is MLX's, and the backend at hand has none of them."""
        manifest = tmp_path / "run" / "vox_adapter.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "quant": quant}))
        out = tmp_path / "merged"
        proof = merge(run, MergeSettings(out=out, onto="trained-base")).proof
        assert proof.from_trained == proof.relative <= proof.tolerance
        update = resolve_reference(run).adapter.modules[PROJECTION.removesuffix(".weight")]
        packed_in = format_of(PROJECTION.removesuffix(".weight"), quant)
        seen = CODECS[packed_in].round_trip(WeightFolder(base).read(PROJECTION))
        expected = seen.astype(np.float32) + 2 * update.B_OR @ update.A_RI
        merged = WeightFolder(out).read(PROJECTION).astype(np.float32)
        assert np.allclose(merged, expected, rtol=2**-8, atol=1e-6)
        noise = merge(run, MergeSettings(out=tmp_path / "plain")).proof
        assert noise.from_trained > 2 * noise.relative

    @pytest.mark.parametrize(
        ("onto", "dtype", "quant", "copies"),
        [
            # In units of the base's bfloat16 bytes: the merged model; and a copy of the trained
            # base, whose linear layers are float32, or else the quantised model, at most as large.
            ("base", "auto", "none", 1),
            ("base", "fp32", "none", 2),
            ("base", "auto", "affine4", 1),
            ("trained-base", "auto", "none", 1),
        ],
    )
    def test_room_is_asked_for_in_the_dtypes_that_are_written(
        self, base, settings, tmp_path, monkeypatch, onto, dtype, quant, copies
    ):
        run = trained_on(train(settings(base, dtype="fp32")), quant="affine4")
        stored = WeightFolder(base)
        plain = sum(info.nbytes for info in stored.tensors.values())
        linear = quantised_modules(stored.tensors, "llama", "nf4").values()
        seen = plain + sum(stored.tensors[module.tensor].nbytes for module in linear)
        needed = copies * plain + seen
        asked = {"onto": onto, "dtype": dtype, "quant": quant}
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage(0, 0, needed - 1))
        with pytest.raises(StorageError, match="not enough room"):
            merge(run, MergeSettings(out=tmp_path / "merged", **asked))
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage(0, 0, needed))
        merge(run, MergeSettings(out=tmp_path / "merged", **asked))


class TestQuantisedFolders:
    def test_it_trains_as_it_is_and_merges_to_a_plain_checkpoint(
        self, base, quantised, settings, lenient, monkeypatch, tmp_path
    ):
        # The CPU backend is shown the dequantised copy, as one with the format would compute.
        real = host.load.Backend.train

        def as_if(backend, job, context):
            plain = tmp_path / "dequantised"
            if not plain.exists():
                from vox_core.run.hf_checkpoint import plain_copy

                with plain_copy(open_weights(job.model), plain) as copy:
                    return real(backend, replace(job, model=copy), context)
            return real(backend, job, context)

        monkeypatch.setattr(host.load.Backend, "train", as_if)
        report = train(settings(quantised, method="dora"))
        assert {request.quant for request in lenient} == {"none", "affine4"}
        run, out = str(report.run), tmp_path / "merged"
        assert resolve_reference(run).quant == "affine4"
        proof = merge(run, MergeSettings(out=out)).proof
        assert proof.from_trained == proof.relative <= proof.tolerance
        config = json.loads((out / "config.json").read_text())
        assert not {"quantization", "quantization_config"} & config.keys()
        merged = WeightFolder(out)
        assert {info.dtype for info in merged.tensors.values()} == {"BF16"}
        assert merged.tensors.keys() == WeightFolder(base).tensors.keys()
        assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16

    def test_asking_for_another_quantisation_is_an_error(self, quantised, settings, lenient):
        with pytest.raises(PlanError, match="quantised already"):
            train(settings(quantised, quant="mxfp4"))
        with pytest.raises(PlanError, match="can"):
            train(settings(quantised, quant="affine4", modules_to_save=["gate_proj"]))

    def test_a_backend_that_cannot_read_it_is_refused_with_the_plain_model_as_remedy(
        self, quantised, settings
    ):
        with pytest.raises(BackendError) as caught:
            train(settings(quantised))
        assert "affine4" in caught.value.where
        assert "name the full-precision model" in caught.value.remedy
        assert "--quant none" not in caught.value.remedy
        with (
            pytest.raises(BackendError, match="full-precision"),
            open_model(str(quantised), GenerateSettings()),
        ):
            pass
