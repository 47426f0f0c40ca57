"""Full fine-tuning, `--method full`: the model's own weights are trained, and a model comes out."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import vox_core
from tests.parity import reference_loop
from tests.run.faulty import saving
from tests.run.interrupted import curve, cut_after, killed, resumed, stop_after
from vox_core import files
from vox_core.config import MergeSettings, SamplingSettings, TrainSettings, validate
from vox_core.contract import LazyMapping, StepDone, TrainState
from vox_core.data.batching import documents_in_step
from vox_core.errors import (
    AdapterError,
    BackendError,
    ConfigError,
    ModelError,
    PlanError,
    PluginError,
    StorageError,
    TrainingError,
)
from vox_core.host import judge
from vox_core.host.load import Backend
from vox_core.run import artifacts, checkpoint
from vox_core.run.checkpoint import CheckpointWriter
from vox_core.run.load import open_model
from vox_core.run.merge import merge
from vox_core.run.plan import has_tied_head
from vox_core.run.reference import resolve_reference
from vox_core.run.run_plan import plan_run
from vox_core.run.train import train
from vox_core.weights import WeightFolder
from vox_torch.train import TorchTrainer

Make = Callable[..., TrainSettings]
# DESIGN.md: two right float32 implementations agree to 1e-5 on losses and to 1e-3 on what is
# trained. Seen: 4e-7, and 4e-6 of the change of the weights.
LOSS, CHANGE = 1e-5, 1e-3
STEPS = 10


@pytest.fixture
def full(tmp_path: Path, data: Path) -> Make:
    """`full(model, key=value, ...)`: five quick float32 steps."""

    def make(base: Path, **given: object) -> TrainSettings:
        quick = {"model": str(base), "data": [data], "out": tmp_path / "run", "dtype": "fp32"}
        numbers = {"method": "full", "max_steps": 5, "batch_size": 2, "lr": 1e-3}
        return validate(TrainSettings, {**quick, **numbers, **given})

    return make


def weights(folder: Path) -> dict[str, np.ndarray]:
    stored = WeightFolder(folder)
    return {name: np.asarray(stored.read(name), np.float64) for name in stored.tensors}


def apart(one: dict, other: dict) -> float:
    """The distance of two models, in the Frobenius norm."""
    assert one.keys() == other.keys()
    return float(np.sqrt(sum(((one[name] - other[name]) ** 2).sum() for name in one)))


# --- what is computed -----------------------------------------------------------------------------


def test_every_loss_and_weight_is_that_of_a_plain_torch_loop(tiny, full, tmp_path):
    """Ten steps of AdamW with warm-up, cosine, clipping and weight decay, which norms and biases do
    not have. The head of this family is its embedding, and its modules have biases."""
    numbers = {"warmup": 0.15, "clip": 1.0, "weight_decay": 0.1}
    base, told = tiny("qwen2"), []
    settings = full(base, max_steps=STEPS, **numbers, micro_batch_tokens=64, tune="ignore")
    dataset = plan_run(settings).data.train
    steps = [
        [
            (dataset[index].tokens_T.tolist(), dataset[index].weights_T.tolist())
            for index in documents_in_step(dataset, settings.batch_size, settings.seed, step)
        ]
        for step in range(1, STEPS + 1)
    ]
    spec, out = tmp_path / "spec.json", tmp_path / "loop.json"
    spec.write_text(json.dumps({"model": str(base), "steps": steps, "lr": 1e-3, **numbers}))
    reference_loop.main(str(spec), str(out))
    run = train(settings, observe=told.append).run
    found = [event.loss for event in told if isinstance(event, StepDone)]
    assert found == pytest.approx(json.loads(out.read_text()), rel=LOSS)
    assert found[-1] < 0.9 * found[0]
    ours, theirs = weights(run / "model"), weights(tmp_path / "loop.adapter")
    assert apart(ours, theirs) < CHANGE * apart(theirs, weights(base))


def test_targets_are_all_that_is_trained(tiny, full):
    run = train(full(tiny("llama"), targets=("down_proj", "lm_head"), max_steps=1)).run
    before, after = weights(tiny("llama")), weights(run / "model")
    moved = {name for name in before if (before[name] != after[name]).any()}
    assert moved == {name for name in before if "down_proj" in name or "lm_head" in name}


@pytest.fixture(scope="module")
def twice(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model whose configuration leaves that to the default, and whose files have the head,
    too."""
    folder = tmp_path_factory.mktemp("twice") / "base"
    shutil.copytree(tiny("gpt2"), folder)
    add_tensor(folder, "lm_head.weight", "transformer.wte.weight")
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_tensor(folder: Path, name: str, like: str) -> None:
    """Store a copy of a tensor under another name."""
    stored = load_file(folder / "model.safetensors")
    stored[name] = stored[like].copy()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def test_a_head_that_is_stored_twice_is_written_twice(twice, full):
    model = weights(train(full(twice, max_steps=1)).run / "model")
    assert model.keys() == weights(twice).keys()
    embedding = model["transformer.wte.weight"]
    assert np.array_equal(model["lm_head.weight"], embedding)
    assert (embedding != weights(twice)["lm_head.weight"]).any()


@pytest.mark.parametrize(
    "given",
    [
        {"targets": ("lm_head",)},
        {"method": "lora", "targets": ("lm_head",)},
        {"method": "lora", "modules_to_save": ("lm_head",)},
    ],
)
def test_a_tied_head_is_not_trained_by_itself(given, twice, full):
    with pytest.raises(PlanError) as caught:
        plan_run(full(twice, **given))
    assert caught.value.code == "VOX-P001" and "tie" in caught.value.faults[0]


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"model_type": "gpt2"}, True),
        ({"model_type": "gpt2", "tie_word_embeddings": False}, False),
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma3", "text_config": {}}, True),
        ({"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}}, False),
        ({"model_type": "of tomorrow"}, False),
    ],
)
def test_a_head_is_tied_as_transformers_ties_it(config, tied):
    assert has_tied_head(config) is tied


def test_a_tensor_that_transformers_ignores_is_named(tiny, full, tmp_path):
    shutil.copytree(tiny("llama"), tmp_path / "base")
    add_tensor(tmp_path / "base", "model.beside.weight", "model.norm.weight")
    with pytest.raises(ModelError) as caught:
        train(full(tmp_path / "base"))
    assert caught.value.code == "VOX-M002" and "model.beside.weight" in caught.value.faults[0]
    assert "--model" not in caught.value.remedy


# --- what comes out -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on a base in several shards, at the default learning rate."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "train.jsonl").write_text(json.dumps({"text": "vox trains every weight"}))
    given = {"model": str(tiny("llama", shard="50KB")), "data": [folder / "train.jsonl"]}
    numbers = {"method": "full", "max_steps": 2, "dtype": "fp32", "out": folder / "run"}
    report = train(validate(TrainSettings, {**given, **numbers}))
    assert report.model == report.run / "model"
    return report.run


def test_the_result_is_a_plain_checkpoint(tiny, ended):
    base, model = tiny("llama", shard="50KB"), ended / "model"
    assert not (ended / "adapter_config.json").exists()
    assert WeightFolder(model).where == WeightFolder(base).where
    assert len(WeightFolder(model).files) > 1
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"
    assert "| method | full, " in (model / "README.md").read_text()
    plain, stored, before = (
        AutoModelForCausalLM.from_pretrained(model),
        weights(model),
        weights(base),
    )
    for name, parameter in plain.named_parameters():
        assert np.array_equal(parameter.detach().double().numpy(), stored[name]), name
        assert (stored[name] != before[name]).any(), name


def test_a_run_is_generated_from(ended):
    said = []
    for reference in (ended, ended / "model"):
        with open_model(str(reference), SamplingSettings(dtype="fp32", max_tokens=4)) as opened:
            said.append("".join(opened.reply([{"role": "user", "content": "Stop?"}])))
    assert said[0] == said[1]


def test_there_is_nothing_to_merge(ended):
    with pytest.raises(AdapterError, match="nothing to merge") as caught:
        merge(str(ended), MergeSettings())
    assert str(ended / "model") in str(caught.value.remedy)


def test_a_run_is_a_model_to_train_on(ended, full):
    assert resolve_reference(str(ended)).base.path == ended / "model"
    model = plan_run(full(ended)).inputs.model
    assert (model.path, model.id) == (ended / "model", ended.name)


# --- going on -------------------------------------------------------------------------------------


def assert_same_model(run: Path, whole: Path) -> None:
    """The same losses and weights, bit for bit."""
    assert curve(run) == curve(whole)
    name = "model/model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_interrupted_run_is_the_undisturbed_one(dtype, tiny, full, tmp_path):
    given = {"save_every": 1, "keep": 9, "dtype": dtype, "weight_decay": 0.1}
    whole = train(full(tiny("llama"), **given, out=tmp_path / "whole")).run
    killed(full(tiny("llama"), **given), cut_after(3))
    assert_same_model(resumed(tmp_path / "run").run, whole)
    if dtype == "bf16":
        _assert_rounded_once(whole)


def _assert_rounded_once(run: Path) -> None:
    """The checkpoint has masters in float32, the model what computed."""
    (newest, *_) = checkpoint.numbered(run / "checkpoints")
    model = WeightFolder(run / "model")
    assert {info.dtype for info in model.tensors.values()} == {"BF16"}
    for name, master in checkpoint.load(newest).adapter.saved.items():
        rounded = torch.tensor(master).bfloat16().float().numpy()
        assert np.array_equal(np.asarray(model.read(name), np.float32), rounded)
        assert (master != rounded).any(), name


def test_a_stopped_run_has_a_model_that_the_end_replaces(tiny, full):
    run = train(full(tiny("llama"), max_steps=2), observe=stop_after(1)).run
    stopped = weights(run / "model")
    resumed(run)
    assert apart(stopped, weights(run / "model")) > 0
    assert [path.name for path in run.iterdir() if path.name.startswith(".tmp-model")] == []


def test_a_folder_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    for text in ("old", "new"):
        with files.atomic_folder(folder, replace=True) as made:
            (made / "file").write_text(text)
    assert (folder / "file").read_text() == "new"
    rename, broken = files.calls.rename, []

    def failing(source: Path, target: Path) -> None:
        if target in broken or (target == folder and (source / "file").read_text() == "newer"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(files.calls, "rename", failing)
    with pytest.raises(StorageError), files.atomic_folder(folder, replace=True) as made:
        (made / "file").write_text("newer")
    assert (folder / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    broken.append(folder)  # it cannot be put back either
    with pytest.raises(StorageError), files.atomic_folder(folder, replace=True) as made:
        (made / "file").write_text("newer")
    (kept,) = tmp_path.iterdir()
    assert (kept / "file").read_text() == "new"


def test_a_whole_models_state_is_written_as_it_is_before_the_next_step(
    ended, tmp_path, monkeypatch
):
    """Without a copy, and read back tensor by tensor."""
    state = checkpoint.load(ended / "checkpoints" / "step-2")
    name = "model.norm.weight"
    assert isinstance(state.adapter.saved[name].base, np.memmap)
    assert isinstance(state.moments[name][0].base, np.memmap)
    monkeypatch.delattr(TrainState, "copy")
    (tmp_path / "again").mkdir()
    writer = CheckpointWriter(tmp_path / "again" / "checkpoints", lambda _: None, saving())
    writer.submit(state)
    assert checkpoint.fault(tmp_path / "again" / "checkpoints" / "step-2") is None
    writer.close()


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """`views(check)`: `check(trainer)` is called wherever a state's weight is read."""

    def checked(check: Callable[[TorchTrainer], None]) -> None:
        whole = TorchTrainer.state

        def state(self: TorchTrainer, learner: str) -> TrainState:
            found = whole(self, learner)
            values = found.adapter.saved

            def read(name: str) -> np.ndarray:
                check(self)
                return values[name]

            return replace(found, adapter=replace(found.adapter, saved=LazyMapping(values, read)))

        monkeypatch.setattr(TorchTrainer, "state", state)

    return checked


def test_a_state_is_read_by_the_training_thread_while_the_trainer_is_open(tiny, full, views):
    begun, read = threading.get_ident(), []

    def check(trainer: TorchTrainer) -> None:
        assert threading.get_ident() == begun and hasattr(trainer, "_adapters")
        read.append(trainer)

    views(check)
    train(full(tiny("llama"), max_steps=2, save_every=1))
    assert read


def test_a_state_that_cannot_be_read_is_the_backends_fault(tiny, full, views):
    def check(trainer: TorchTrainer) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    views(check)
    with pytest.raises(PluginError, match="illegal memory access"):
        train(full(tiny("llama"), max_steps=1))


def test_a_full_disk_at_the_end_leaves_a_model(tiny, ended, full, tmp_path):
    state = checkpoint.load(ended / "checkpoints" / "step-2")
    plan = plan_run(full(tiny("llama", shard="50KB"), out=tmp_path / "other"))
    (tmp_path / "other").mkdir()
    full_disk = files.storage_error(OSError(errno.ENOSPC, "No space left"), tmp_path)
    error = artifacts.emergency_save(full_disk, plan, state)
    assert "--out" not in error.remedy and f"--resume {tmp_path / 'other'}" in error.remedy
    (kept,) = (tmp_path / "other").glob("vox-model-*")
    assert str(kept) in str(error)
    assert apart(weights(kept), weights(ended / "model")) == 0


# --- objectives -----------------------------------------------------------------------------------


def test_the_reference_of_an_objective_stays_the_base(tiny, full, tmp_path, monkeypatch):
    """Also for a run that goes on and finds no cached scores: the trainer's base has learnt. With
    cached ones the base is not loaded again."""
    given, loaded = {**pairs(tmp_path), "save_every": 1, "keep": 9, "max_steps": 3}, []
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    load = Backend.load
    monkeypatch.setattr(Backend, "load", lambda *job: loaded.append(job) or load(*job))
    whole = train(full(tiny("llama"), **given, out=tmp_path / "whole")).run
    assert len(loaded) == 1
    losses = [float.fromhex(loss) for loss in curve(whole).values()]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-6) and losses[-1] < losses[0]
    killed(full(tiny("llama"), **given), cut_after(2))
    assert len(loaded) == 1
    shutil.rmtree(tmp_path / "cache" / "reference")
    assert_same_model(resumed(tmp_path / "run").run, whole)


def pairs(folder: Path) -> dict[str, object]:
    """Settings of a run on preferences."""
    rows = [{"prompt": f"{n}?", "chosen": f"{n} it is.", "rejected": "Why?"} for n in range(6)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"data": [folder / "pairs.jsonl"], "objective": "dpo"}


def test_a_second_model_that_does_not_fit_says_how_to_go_on(tiny, full, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vox_torch.load.load_base", fail)
    with pytest.raises(TrainingError) as caught:
        train(full(tiny("llama"), **pairs(tmp_path)))
    assert caught.value.code == "VOX-T002" and "--quant" not in caught.value.remedy
    assert f"vox train --resume {tmp_path / 'run'}" in caught.value.remedy


def test_a_reference_needs_a_backend_that_loads(tiny, full, tmp_path, monkeypatch):
    """Found while planning. Without a reference nothing is loaded."""

    def require(self: Backend, operation: str) -> None:
        if operation == "load":
            raise BackendError("B004", "no vox_load", remedy="choose another one")

    monkeypatch.setattr(Backend, "require", require)
    with pytest.raises(BackendError, match="no vox_load"):
        plan_run(full(tiny("llama"), **pairs(tmp_path)))
    plan_run(full(tiny("llama"), **pairs(tmp_path), method="lora"))
    plan_run(full(tiny("llama")))


# --- what is refused ------------------------------------------------------------------------------


def test_settings_of_an_adapter_are_refused():
    assert validate(TrainSettings, {"method": "full"}).lr == 2e-5
    given = {"rank": 16, "dropout": 0.1, "modules_to_save": ("lm_head",), "quant": "nf4"}
    with pytest.raises(ConfigError) as caught:
        validate(TrainSettings, {"method": "full", **given})
    assert "leave out --rank, --dropout, --modules-to-save, --quant" in str(caught.value)
    assert caught.value.where == "vox train"


def test_a_quantised_model_is_refused(tiny, full, tmp_path):
    settings = full(_quantised(tiny("llama"), tmp_path / "quantised"))
    with pytest.raises(PlanError) as caught:
        train(settings)
    assert caught.value.code == "VOX-P001"
    assert "(mxfp4)" in caught.value.faults[0]
    assert "name the full-precision model" in caught.value.faults[0]


def _quantised(base: Path, out: Path) -> Path:
    from vox_core.contract import WriteModelJob
    from vox_core.host.load import write_model

    out.mkdir()
    write_model(WriteModelJob(base, "mxfp4", out))
    return out


def test_a_backend_without_it_is_refused_and_one_with_it_is_named(tiny, full, monkeypatch):
    lora = "method full (has: lora)"
    monkeypatch.setattr(judge, "lacking", lambda _, has: lora * ("metal" in has.devices))
    with pytest.raises(BackendError) as caught:
        train(full(tiny("llama"), backend="mlx"))
    assert "method full" in str(caught.value) and "--backend cpu" in str(caught.value)


def test_a_loop_of_ones_own_trains_adapters(tiny):
    with pytest.raises(ConfigError, match="a loop of one's own trains adapters"):
        vox_core.open_trainer(str(tiny("llama")), method="full")
