"""`vox merge --quant`: what it writes and verifies, and what it refuses before any work."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from vox_core import host
from vox_core.adapter.targets import quantised_modules
from vox_core.config import MergeSettings
from vox_core.contract import WriteModelJob
from vox_core.errors import BackendError, ModelError, PlanError, ProofError
from vox_core.host.load import write_model
from vox_core.run import merge as merging
from vox_core.run.merge import merge
from vox_core.run.reference import resolve_reference
from vox_core.run.train import train
from vox_core.weights import WeightFolder, open_weights
from vox_export import requantise
from vox_formats.quant import MLX_FORMATS, MlxFormat
from vox_testing.llama import write_llama
from vox_testing.tiny import make_model


@pytest.fixture(autouse=True)
def _the_cpu_alone(monkeypatch):
    """Another backend that is installed here may have the quantisations."""
    installed = {entry.name for entry in metadata.entry_points(group="vox_core.plugins")}
    others = installed - {"cpu", "export"}
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", ",".join(sorted(others)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama whose widths are multiples of 64, in bfloat16."""
    return write_llama(tmp_path_factory.mktemp("llama") / "base", dtype="BF16")


@pytest.fixture
def run(base, settings):
    return str(train(settings(base, dtype="bf16")).run)


def test_a_format_whose_plugin_is_disabled_or_missing_is_refused(monkeypatch):
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "export")
    with pytest.raises(BackendError, match="comes with plugin 'export'") as caught:
        write_model(WriteModelJob(Path("anywhere"), "affine4"))
    assert (caught.value.code, caught.value.exit_code) == ("VOX-B013", 2)
    with pytest.raises(BackendError, match="no installed plugin provides 'onnx'"):
        write_model(WriteModelJob(Path("anywhere"), "onnx"))


@pytest.mark.parametrize("quant", ["affine4", "affine8", "mxfp4", "nvfp4"])
def test_a_merged_model_is_written_quantised_on_request(base, run, tmp_path, quant):
    merge(run, MergeSettings(out=tmp_path / "plain"))
    out = tmp_path / "merged"
    report = merge(run, MergeSettings(out=out, quant=quant))
    assert report.requantised.quant == quant
    assert report.requantised.distance is None  # nothing installed here loads it
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == MLX_FORMATS[quant].describe()
    plain, written = WeightFolder(tmp_path / "plain"), open_weights(out)
    assert written.quant == quant
    assert written.tensors.keys() == plain.tensors.keys()
    reached = {m.tensor for m in quantised_modules(plain.tensors, "llama", "affine4").values()}
    assert written.quantised == reached
    assert "lm_head.weight" not in reached
    for name in plain.tensors:
        W = plain.read(name)
        expected = MLX_FORMATS[quant].round_trip(W) if name in reached else W
        assert written.read(name).tobytes() == expected.tobytes()


def test_its_distance_is_told_where_a_backend_loads_it(run, tmp_path, monkeypatch):
    jobs = []

    def logits_of(backend, job, *more):
        jobs.append(job)
        if job.quant != "none":
            job = replace(job, model=plain, quant="none", streamed=True)
        return real(backend, job, *more)

    plain, real = tmp_path / "plain", merging.probe_logits
    merge(run, MergeSettings(out=plain))
    monkeypatch.setattr(
        merging, "choose", lambda asked, seen: host.choose(replace(asked, quant="none"), seen=seen)
    )
    monkeypatch.setattr(merging, "probe_logits", logits_of)
    report = merge(run, MergeSettings(out=tmp_path / "merged", quant="affine8"))
    assert "affine8" in [job.quant for job in jobs]
    assert report.requantised.distance == 0  # it was shown the plain model


def test_a_tensor_that_was_written_wrong_fails_the_proof(run, tmp_path, monkeypatch):
    real = MlxFormat.quantise

    def wrong(form, W_OI):
        packed = real(form, W_OI)
        packed.weight[0, 0] ^= 1
        return packed

    write = requantise.write_checkpoint

    def writing(folder, weights):
        with monkeypatch.context() as patched:
            patched.setattr(MlxFormat, "quantise", wrong)
            write(folder, weights)

    monkeypatch.setattr(requantise, "write_checkpoint", writing)
    with pytest.raises(ProofError, match="not the quantisation of the merged one"):
        merge(run, MergeSettings(out=tmp_path / "merged", quant="affine4"))
    assert not (tmp_path / "merged").exists()


def test_what_could_not_be_written_is_refused_before_any_work(tiny, settings, tmp_path):
    gpt2 = train(settings(tiny("gpt2"), max_steps=1, out=tmp_path / "gpt2"))
    with pytest.raises(ModelError, match="cannot be read or written in MLX") as caught:
        merge(str(gpt2.run), MergeSettings(out=tmp_path / "merged", quant="affine4"))
    assert "gpt2" in caught.value.found
    narrow = train(settings(tiny("llama"), max_steps=1, out=tmp_path / "narrow"))
    with pytest.raises(PlanError) as refused:
        merge(str(narrow.run), MergeSettings(out=tmp_path / "merged", quant="affine4"))
    assert refused.value.faults[0].startswith("model.layers.0.mlp.gate_proj: 32 input features")


def test_a_mixture_of_experts_is_not_written_for_mlx_lm(tmp_path):
    folder = make_model("mixtral", tmp_path / "base")
    with pytest.raises(ModelError, match="mixture of experts") as caught:
        requantise.mlx_lm_config(json.loads((folder / "config.json").read_text()), folder)
    assert caught.value.found == "num_local_experts = 4 in config.json"
    assert "gguf" not in caught.value.remedy


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic in llama",
        ),
        (
            {"model_type": "mistral", "sliding_window": 128},
            "a window of 128 tokens, positions for 512",
        ),
        (
            {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True},
            "a window of 128 tokens, positions for 512",
        ),
        (  # what mistral's configuration leaves out, transformers takes to be 4096
            {"model_type": "mistral", "max_position_embeddings": 8192},
            "a window of 4096 tokens, positions for 8192",
        ),
    ],
)
def test_what_no_configuration_tells_mlx_lm_is_refused_before_any_work(
    base, run, tmp_path, monkeypatch, said, fault
):
    config = json.loads((base / "config.json").read_text())
    source = retold(resolve_reference(run), tmp_path, {**config, **said})
    monkeypatch.setattr("vox_core.run.merge.resolve_reference", lambda *_, **__: source)
    with pytest.raises(ModelError) as caught:
        merge(run, MergeSettings(out=tmp_path / "merged", quant="affine4"))
    assert caught.value.code == "VOX-M002"
    assert caught.value.found == fault
    assert caught.value.remedy == "`vox export --to gguf`, or `vox merge` without --quant"
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "said",
    [
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False},
    ],
)
def test_a_window_that_leaves_nothing_out_may_be_written(base, run, tmp_path, said):
    config = {**json.loads((base / "config.json").read_text()), **said}
    source = retold(resolve_reference(run), tmp_path, config)
    requantise.require_quantisable(source.base.path, "affine4")


def retold(source, folder, config):
    """The source with another `config.json`; its weights are where they were."""
    (folder / "retold").mkdir()
    for file in source.base.path.glob("*.safetensors*"):
        (folder / "retold" / file.name).symlink_to(file)
    (folder / "retold" / "config.json").write_text(json.dumps(config))
    told = replace(source.base, path=folder / "retold", model_type=config["model_type"])
    return replace(source, base=told)
