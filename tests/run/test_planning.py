"""`vox plan` on a real backend: what it says, what it refuses, and that it writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vox_core.config import TrainSettings, validate
from vox_core.contract import Event, Notice
from vox_core.errors import InputError, PluginError
from vox_core.host.probe import Device
from vox_core.memory import Option
from vox_core.run import foresight
from vox_core.run.planning import plan
from vox_core.run.prepare import prepare
from vox_core.run.train import train
from vox_core.weights import WeightFolder

GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """`free(bytes)`: so much is free on the device, of twice as much."""

    def have(size: int | None) -> None:
        device = Device("a device", "cpu", size and 2 * size, size)
        monkeypatch.setattr(foresight, "_device", lambda prepared: device)

    return have


def files_under(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_it_says_what_train_does_and_writes_nothing(tiny, settings, data, tmp_path, monkeypatch):
    asked = settings(tiny("llama"), valid=data / "valid.jsonl", epochs=2, max_steps=0)
    before = files_under(tmp_path)
    with monkeypatch.context() as guarded:
        guarded.setattr(WeightFolder, "read", None)  # headers are enough
        found = plan(asked)
    assert files_under(tmp_path) == before
    run = train(asked).run
    made = json.loads((run / "plan.json").read_text())
    preflight = json.loads((run / "preflight.json").read_text())
    contract = made["contract"]
    assert found.backend.id == made["backend"]
    assert found.backend.why == preflight["selection"]["why"].replace(  # what is free changes
        preflight["selection"]["hardware"]["detail"], found.backend.why.rpartition(": ")[2]
    )
    assert (found.dtype, found.quant) == (made["dtype"], contract["quant"])
    assert found.data == {**preflight["data"], "longest": found.data["longest"]}
    assert max(found.data["longest"], found.valid["longest"]) == made["longest"]
    assert found.steps.total == contract["total_steps"]
    assert found.adapter.modules == len(made["modules"])
    assert found.run == run
    there = {path.name for path in run.iterdir()} - {".lock"}
    assert {name.partition("/")[0] for name in found.writes} == there
    size = (run / "adapter_model.safetensors").stat().st_size
    assert size > 4 * found.adapter.trainable_parameters


def test_without_data_whole_documents_are_assumed(tiny, settings):
    found = plan(settings(tiny("llama"), data=[], batch_size=3, max_steps=0, seq_len=100))
    assert (found.data, found.steps.total) == (None, None)
    assert found.assumed == {"documents": 3, "tokens": 100}
    assert found.steps.tokens == 300
    assert found.steps.largest["laid"] == 300
    assert found.memory.peak == sum(found.memory.parts.values())


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"data": ["nowhere.jsonl"]}, "VOX-D001"),
        ({"targets": ["nothing"]}, "VOX-P002"),
        ({"backend": "nobody"}, "VOX-B003"),
        ({"seq_len": 4096}, "VOX-P001"),
        ({"out": Path()}, "VOX-O001"),
    ],
)
def test_what_train_refuses_is_refused(tiny, settings, given, code):
    asked = settings(tiny("llama"), **given)
    for work in (plan, train):
        with pytest.raises(InputError) as caught:
            work(asked)
        assert caught.value.code == code


def test_a_run_is_planned_to_its_end_and_held_against_its_contract(tiny, settings, tmp_path):
    asked = settings(tiny("llama"), max_steps=4, save_every=2)

    def stop(event: Event) -> None:
        if event.name == "checkpoint":
            raise OSError("enough")

    with pytest.raises(PluginError, match="enough"):
        train(asked, observe=stop)
    run = asked.out
    found = plan(validate(TrainSettings, {"resume": run}))
    assert (found.run, found.steps.total) == (run, 4)
    with pytest.raises(InputError) as caught:
        plan(validate(TrainSettings, {"resume": run, "seed": 1}))
    assert caught.value.code == "VOX-P003"


def test_settings_that_save_memory_are_in_the_prediction(tiny, settings):
    model = tiny("llama")
    peaks = {
        key: plan(settings(model, **given)).memory.parts
        for key, given in {
            "as it is": {},
            "bf16": {"dtype": "bf16"},
            "checkpointing": {"gradient_checkpointing": True},
            "rank": {"rank": 64},
        }.items()
    }
    was = peaks["as it is"]
    assert peaks["bf16"]["weights"] == was["weights"] / 2
    assert peaks["checkpointing"]["activations"] < was["activations"]
    assert peaks["rank"]["adapter"] > was["adapter"]


def test_the_grid_is_for_the_backend_and_the_device(tiny, settings, free):
    free(GB)
    found = plan(settings(tiny("llama")))
    assert found.memory.free == GB and found.memory.total == 2 * GB and found.memory.fits
    (suggested,) = found.suggested
    assert suggested.memory == GB and isinstance(suggested.option, Option)
    assert {option.gradient_checkpointing for option in found.options} == {False, True}
    assert [option.quant for option in found.options[::10]] == [
        *("none", "int8", "nf4-single", "nf4", "nf4-embeddings")
    ]
    packed = plan(settings(tiny("llama"), quant="nf4")).memory
    assert packed.parts["weights"] < found.memory.parts["weights"]
    (first, second) = plan(settings(tiny("llama")), memory=[1000, GB]).suggested
    assert first.option is None
    assert second.option == suggested.option
    free(None)
    unknown = plan(settings(tiny("llama")))
    assert (unknown.memory.fits, unknown.suggested) == (None, ())


def test_train_warns_and_goes_on_where_memory_may_not_suffice(tiny, settings, free):
    events: list[Event] = []
    asked = settings(tiny("llama"), max_steps=1)
    free(1000)
    assert train(asked, observe=events.append).steps == 1
    warnings = [e for e in events if isinstance(e, Notice) and e.level == "warning"]
    (said,) = [warning.message for warning in warnings if "memory" in warning.message]
    assert "0.0 GB free" in said
    assert "no quantisation" in said


def test_the_warning_names_settings_that_fit(tiny, settings, free):
    wide = settings(tiny("llama"), data=[], micro_batch_tokens=8192, batch_size=64, seq_len=128)
    prepared = prepare(wide, None, None, None, only_planned=True)
    peak = foresight.foresee(prepared).prediction.peak
    free(peak)
    assert foresight.warning(prepared) is None
    free(peak - 1)
    said = foresight.warning(prepared)
    assert said is not None and said.level == "warning"
    assert "--micro-batch-tokens " in said.message
    assert f"{peak / 1e9:.1f} GB at the peak" in said.message


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gpt2", "phi3", "mistral", "qwen3"])
def test_every_family_has_layers_that_keep_something(family, tiny, settings):
    found = plan(settings(tiny(family), data=[]))
    assert found.memory.parts["activations"] > 0
