"""`vox plan` on a real backend: what it says, what it refuses, and that it writes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from vox_core.cli.output import print_json
from vox_core.config import MergeSettings, TrainSettings, validate
from vox_core.contract import Event, Notice, StepDone, Validation
from vox_core.errors import ConfigError, InputError, OutputError, PlanError
from vox_core.host.probe import Device
from vox_core.run import merge as merging
from vox_core.run import plan as core_plan
from vox_core.run.merge import merge
from vox_core.run.resume import read_plan
from vox_core.run.run_plan import plan_run
from vox_core.run.session import Session
from vox_core.run.telemetry import read_run
from vox_core.run.train import train
from vox_core.weights import SafetensorsFile
from vox_plan import memory_forecast, stopwatch, tuning_cache
from vox_plan.cli import show
from vox_plan.memory_forecast import Option, forecast
from vox_plan.planner import plan
from vox_plan.tuning_cache import Tuned

GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """`free(bytes, total)`: so much is free on the device, of twice as much."""

    def have(size: int | None, total: int | None = None) -> None:
        device = Device("a device", "cpu", total or (size and 2 * size), size)
        monkeypatch.setattr(memory_forecast, "_device", lambda prepared: device)

    return have


def files_under(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_it_says_what_train_does_and_writes_nothing(tiny, settings, data, tmp_path, monkeypatch):
    asked = settings(tiny("llama"), valid=data / "valid.jsonl", epochs=2, max_steps=0)
    before = files_under(tmp_path)
    with monkeypatch.context() as guarded:
        guarded.setattr(SafetensorsFile, "read", None)  # headers are enough
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

    with pytest.raises(OSError, match="enough"):
        train(asked, observe=stop)
    run = asked.out
    checkpoint = run / "checkpoints/step-2"
    there = sum(each.stat().st_size for each in checkpoint.rglob("*"))
    found = plan(validate(TrainSettings, {"resume": run}))
    assert (found.run, found.steps.total) == (run, 4)
    anew = plan(asked.model_copy(update={"out": run.parent / "anew"}))
    assert found.disk.needed == anew.disk.needed - there  # what the run already has
    with pytest.raises(InputError) as caught:
        plan(validate(TrainSettings, {"resume": run, "seed": 1}))
    assert caught.value.code == "VOX-P003"


def test_processes_share_a_machine(tiny, settings):
    """Each has the whole model; the chain and the broadcast of two send two gradients."""
    model = tiny("llama")
    one, two = (plan(settings(model, processes=n)) for n in (1, 2))
    assert one.processes is two.speed is None
    gradient = 4 * one.adapter.trainable_parameters
    assert (two.processes.count, two.processes.wire) == (2, gradient)
    assert two.memory.parts == {**one.memory.parts, "kept": gradient}
    assert two.processes.memory == 2 * two.memory.peak
    assert two.memory.total == one.memory.total // 2
    idle = "1 micro-batch in an average step for 2 processes: lower --micro-batch-tokens, for"
    assert any(each.startswith(idle) for each in two.warnings)
    busy = plan(settings(model, processes=2, micro_batch_tokens=16), memory=(8 * GB,))
    assert not busy.warnings
    assert [each.option.micro_batch_tokens for each in busy.suggested] == [16]


def test_processes_that_split_the_base(tiny, settings):
    """Each holds half of both layers' matrices, and has one layer twice when it is gathered."""
    model = tiny("llama")
    whole, split = (
        plan(settings(model, processes=2, shard=shard, dtype="fp32")) for shard in (False, True)
    )
    layer = 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
    assert whole.memory.parts["weights"] - split.memory.parts["weights"] == layer
    assert split.memory.parts["transients"] - whole.memory.parts["transients"] == 2 * layer
    passes = math.ceil(math.ceil(split.steps.tokens / split.steps.micro_batch_tokens) / 2)
    assert split.processes.wire - whole.processes.wire == 2 * passes * layer


def test_processes_that_split_what_they_train(tiny, data, tmp_path):
    """Each has masters, gradients and moments of half of both layers' matrices, and no bfloat16
    weights of them. A gradient goes to the other in parts, in each pass."""
    given = {"model": str(tiny("llama")), "data": [data], "out": tmp_path / "run"}
    given |= {"method": "full", "processes": 2, "dtype": "bf16"}
    whole, split = (
        plan(validate(TrainSettings, {**given, "shard": shard})) for shard in (False, True)
    )
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64
    parts = whole.memory.parts, split.memory.parts
    spared = {key: parts[0][key] - parts[1][key] for key in ("weights", "adapter")}
    assert spared == {"weights": 2 * 2 * layer, "adapter": (4 + 12) * layer}
    rest = 4 * (whole.adapter.trainable_parameters - 2 * layer)
    assert parts[1]["kept"] == rest
    passes = math.ceil(math.ceil(split.steps.tokens / split.steps.micro_batch_tokens) / 2)
    assert split.processes.wire - rest == passes * (2 * 2 + 4) * layer
    given |= {"objective": "grpo", "reward": "exact", "objective_options": {"beta": "0.1"}}
    given |= {"optimizer": "adamw-8bit", "shard": True}
    with pytest.raises(InputError) as caught:
        plan(validate(TrainSettings, given))
    assert caught.value.faults == (
        "--optimizer adamw-8bit, with --method full",
        "an objective with a reference model, with --method full",
    )


def test_a_base_that_cannot_be_split(tiny, settings):
    def refused(**given: object) -> InputError:
        with pytest.raises(InputError) as caught:
            plan(settings(tiny("llama"), shard=True, **given))
        return caught.value

    assert refused().code == "VOX-C004"
    given = {"processes": 2, "quant": "int8", "method": "dora", "modules_to_save": ["lm_head"]}
    error = refused(**given)
    assert error.code == "VOX-P001"
    assert error.faults == ("a base quantised to int8", "--method dora", "--modules-to-save")
    error = refused(processes=2, backend="mlx", launcher="mlx")
    assert error.faults == ("backend 'mlx'",)


def test_settings_that_save_memory_are_in_the_prediction(tiny, settings):
    model = tiny("llama")
    peaks = {
        key: plan(settings(model, **given)).memory.parts
        for key, given in {
            "as it is": {},
            "bf16": {"dtype": "bf16"},
            "checkpointing": {"gradient_checkpointing": True},
            "rank": {"rank": 8},
        }.items()
    }
    was = peaks["as it is"]
    assert peaks["bf16"]["weights"] == was["weights"] / 2
    assert peaks["checkpointing"]["activations"] < was["activations"]
    assert peaks["rank"]["adapter"] > was["adapter"]


def test_answers_need_caches_and_longer_documents(tiny, settings, data, monkeypatch, capsys):
    given = {"objective": "grpo", "reward": "exact", "rollouts": 4, "batch_size": 3}
    asked = settings(tiny("llama"), **given, rollout_tokens=24, micro_batch_tokens=512)
    monkeypatch.setattr(memory_forecast, "most_rows", lambda _: 8)
    found, planned = plan(asked), plan_run(asked)
    rows = planned.data.train
    prompt = max(len(each) - int((each.weights_T > 0).sum()) for each in rows)
    longest, config = prompt + 24, planned.inputs.config
    assert found.steps.largest["longest"] == longest
    assert found.steps.largest["trained"] == min(12, 512 // longest) * 24
    # Keys and values of two layers with 2 heads, in float32; 8 of the 12 answers at once.
    size = 2 * 2 * 2 * config["hidden_size"] // config["num_attention_heads"] * 4
    assert found.memory.parts["caches"] == 8 * longest * size
    show(found)
    printed = capsys.readouterr().out
    assert "of 4 answers to each of 3 prompts" in printed
    assert "rollouts.jsonl" in found.writes
    assert "supervised training in one process alone" in printed
    monkeypatch.setattr(memory_forecast, "most_rows", lambda _: 32)
    assert plan(asked).memory.parts["caches"] == 12 * longest * size
    with pytest.raises(ConfigError, match="in supervised training"):
        plan(asked, measured=True)


def test_a_teacher_is_in_memory_too(tiny, settings):
    model = tiny("llama")
    found = plan(settings(model, objective="distill", teacher=str(model))).memory.parts
    assert found["reference"] == found["weights"] > 0


@pytest.mark.parametrize(
    ("method", "beta", "times"), [("full", "0.1", 1), ("full", "0", 0), ("lora", "0.1", 0)]
)
def test_the_reference_of_a_fully_trained_model_is_in_memory_too(
    method, beta, times, tiny, data, tmp_path
):
    given = {"objective": "grpo", "reward": "exact", "objective_options": {"beta": beta}}
    run = {"model": str(tiny("llama")), "data": [data], "out": tmp_path / "run"}
    found = plan(validate(TrainSettings, {"method": method, **run, **given})).memory.parts
    assert found["reference"] == times * found["weights"]


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
    free(1000, 100 * GB)
    assert train(asked, observe=events.append).steps == 1
    warnings = [e for e in events if isinstance(e, Notice) and e.level == "warning"]
    (said,) = [warning.message for warning in warnings if "memory" in warning.message]
    assert "0.0 GB free" in said
    assert "this fits: " in said


def test_more_than_the_device_has_is_refused_before_any_work(tiny, settings, free):
    asked = settings(tiny("llama"), max_steps=1)
    peak = plan(asked).memory.peak
    free(None, round(peak / 1.19))  # within the error of the prediction
    assert plan(asked).refused is None
    free(None, round(peak / 1.21))
    before = files_under(asked.out.parent)
    refreshed = asked.model_copy(update={"tune": "refresh"})
    for work in (train, lambda given: plan(given, measured=True)):
        for each in (asked, refreshed):
            with pytest.raises(PlanError) as caught:
                work(each)
            assert caught.value.code == "VOX-P004"
    assert files_under(asked.out.parent) == before
    error = caught.value
    assert f"{peak / 1e9:.1f} GB" in error.found and "20%" in error.expected
    assert "--seq-len" in error.remedy and "--allow-overcommit" in error.remedy
    assert "VOX-P004" in plan(asked).refused and error.remedy in plan(asked).refused
    allowed = asked.model_copy(update={"allow_overcommit": True})
    assert plan(allowed).refused is None
    assert train(allowed).steps == 1


def test_a_resumed_run_that_does_not_fit_is_refused(tiny, settings, free, monkeypatch):
    asked = settings(tiny("llama"), max_steps=2, batch_size=4, micro_batch_tokens=4096)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "stop_requested", lambda self: True)
        assert train(asked).stopped
    again = {"resume": asked.out}
    peak = forecast(plan_run(validate(TrainSettings, again))).prediction.peak
    free(None, round(peak / 1.3))
    with pytest.raises(PlanError) as caught:
        train(validate(TrainSettings, again))
    assert caught.value.code == "VOX-P004"
    assert "no setting that a resumed run may change makes it fit" in caught.value.remedy
    report = train(validate(TrainSettings, {**again, "allow_overcommit": True}))
    assert report.steps == 2
    assert "allow_overcommit" not in json.loads((report.run / "plan.json").read_text())["settings"]


def test_what_a_resumed_run_may_change_is_what_is_suggested(tiny, settings, monkeypatch):
    prepared = plan_run(settings(tiny("llama"), dropout=0.1))
    grid = memory_forecast.alternatives(prepared)
    kept = [each for each in grid if memory_forecast._may_change_to(each, prepared)]
    assert {(each.quant, each.micro_batch_tokens) for each in kept} == {("none", 2048)}
    prepared = plan_run(settings(tiny("llama")))
    kept = [each for each in grid if memory_forecast._may_change_to(each, prepared)]
    assert len(kept) == 10 and {each.quant for each in kept} == {"none"}


def test_the_refusal_names_settings_that_fit(tiny, settings, free, monkeypatch):
    prepared = plan_run(settings(tiny("llama")))
    free(None, forecast(prepared).prediction.peak // 2)
    frugal = Option("none", True, 512, 10**6)
    monkeypatch.setattr(memory_forecast, "alternatives", lambda prepared: [frugal])
    resumed = replace(prepared, previous=object())
    error = memory_forecast.refusal(resumed, forecast(resumed))
    assert "this fits: --gradient-checkpointing --micro-batch-tokens 512" in error.remedy


def test_a_rank_above_the_smaller_side_of_a_module_is_refused(tiny, settings):
    model = tiny("llama")  # k_proj and v_proj map 32 to 16
    assert plan(settings(model, rank=16)).adapter.rank == 16
    with pytest.raises(PlanError) as caught:
        plan(settings(model, rank=17))
    assert caught.value.code == "VOX-P001"
    (fault,) = caught.value.faults
    assert fault == (
        "--rank 17: model.layers.0.self_attn.k_proj is 16 x 32; the largest rank that fits is 16, "
        "or train other modules alone: --targets down_proj --targets gate_proj --targets o_proj "
        "--targets q_proj --targets up_proj"
    )
    others = ("down_proj", "gate_proj", "o_proj", "q_proj", "up_proj")
    assert plan(settings(model, rank=17, targets=others)).adapter.rank == 17
    with pytest.raises(PlanError) as caught:
        plan(settings(model, rank=65))
    assert caught.value.faults[0].endswith("the largest rank that fits is 16")


def test_a_rate_that_nobody_uses_is_among_the_warnings(tiny, settings):
    assert not plan(settings(tiny("llama"), lr=1e-2)).warnings
    (said,) = plan(settings(tiny("llama"), lr=1.0)).warnings
    assert said.startswith("--lr 1 is outside the range")


@pytest.mark.parametrize(
    ("out", "how"),
    [
        ("data/train.jsonl", "lies inside --data"),
        ("data", "is --data"),
        ("data/run", "lies inside --data"),
        ("held.jsonl", "is --valid"),
        (".", "contains --data"),
        ("model", "is --model"),
        ("model/run", "lies inside --model"),
    ],
)
def test_out_is_held_against_what_is_read(out, how, tiny, settings, data, tmp_path):
    (tmp_path / "model").symlink_to(tiny("llama"))
    (data / "valid.jsonl").rename(tmp_path / "held.jsonl")
    asked = settings(tmp_path / "model", valid=tmp_path / "held.jsonl", out=tmp_path / out)
    with pytest.raises(OutputError) as caught:
        train(asked)
    assert caught.value.code == "VOX-O004"
    does, flag = how.rsplit(maxsplit=1)
    assert caught.value.what == f"the output path {does} one that is read"
    assert caught.value.found.startswith(f"{flag} ")


def test_an_output_may_lie_in_the_working_folder_that_is_the_data(
    tiny, settings, data, monkeypatch
):
    monkeypatch.chdir(data)
    assert plan(settings(tiny("llama"), data=["."], out="runs/a")).run == Path("runs/a")


def test_nobody_is_told_to_remove_what_is_in_the_way(tiny, settings, tmp_path):
    for name in ("notes.txt", "folder"):
        there = tmp_path / name
        there.mkdir() if name == "folder" else there.write_text("mine")
        with pytest.raises(OutputError) as caught:
            train(settings(tiny("llama"), out=there))
        assert caught.value.code == "VOX-O001"
        assert caught.value.found == ("a folder" if name == "folder" else "a file")
        assert caught.value.remedy == "choose another one with --out"


def test_the_warning_names_settings_that_fit(tiny, settings, free):
    wide = settings(tiny("llama"), data=[], micro_batch_tokens=8192, batch_size=64, seq_len=128)
    prepared = plan_run(wide, only_planned=True)
    peak = forecast(prepared).prediction.peak
    free(peak)
    assert memory_forecast.shortage(prepared, forecast(prepared)) is None
    free(peak - 1)
    said = memory_forecast.shortage(prepared, forecast(prepared))
    assert "--micro-batch-tokens " in said
    assert f"{peak / 1e9:.1f} GB at the peak" in said


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gpt2", "phi3", "mistral", "qwen3"])
def test_every_family_has_layers_that_keep_something(family, tiny, settings):
    found = plan(settings(tiny(family), data=[]))
    assert found.memory.parts["activations"] > 0


WORK = {
    "a part of an epoch": {"max_steps": 2, "batch_size": 2},
    "steps across epochs": {"max_steps": 0, "epochs": 2.5, "batch_size": 4},
    "a step is an epoch": {"max_steps": 3, "batch_size": 64},
    "cut rows": {"max_steps": 4, "seq_len": 64},
}


@pytest.mark.parametrize("case", WORK)
def test_steps_tokens_and_validations_are_exact(case, tiny, settings, data):
    asked = settings(tiny("llama"), valid=data / "valid.jsonl", eval_every=2, **WORK[case])
    found, told = plan(asked).steps, []
    train(asked, observe=told.append)
    steps = [event for event in told if isinstance(event, StepDone)]
    assert found.total == len(steps)
    assert found.work.tokens == sum(step.tokens for step in steps)
    assert found.work.trained_tokens == sum(step.trained_tokens for step in steps)
    assert found.validations == sum(isinstance(event, Validation) for event in told)


@pytest.fixture
def kept(tmp_path, capsys):
    """`kept(settings)`: the plan in a file, as `vox plan --json > plan.json` leaves it."""

    def keep(asked: TrainSettings) -> Path:
        print_json(plan(asked, to_be_run=True))
        (tmp_path / "plan.json").write_text(capsys.readouterr().out)
        return tmp_path / "plan.json"

    return keep


def run_plan(path: Path, **flags: object):
    """What the command does."""
    planned = read_plan(path, flags)
    return train(planned.settings, pinned=planned)


def test_a_plan_is_run_as_it_was_made(tiny, settings, kept, tmp_path, monkeypatch):
    """Its digest is in the run; what was measured since, and other sources, are not looked at."""
    asked = settings(tiny("llama"), out=None, backend=None, rank=3)
    path = kept(asked)
    made = json.loads(path.read_text())
    (tmp_path / "vox.toml").write_text("[train]\nrank = 9\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOX_TRAIN_SEED", "1")
    monkeypatch.setattr(tuning_cache, "load", lambda _: Tuned(7, {"threads": "half"}, 2.0, 1.0))
    report = run_plan(path, out=tmp_path / "planned")
    told = json.loads((report.run / "plan.json").read_text())
    assert told["planned"] == made["digest"]
    assert (told["contract"], told["digest"]) == (
        made["exact"]["contract"],
        made["exact"]["digest"],
    )
    assert (told["micro_batch_tokens"], told["tuning"]) == (2048, {})
    assert told["settings"]["backend"] is None, "where it goes on, another may"
    assert told["sources"] == made["exact"]["sources"]
    assert {"weights", "tokenizer", "config", "data", "valid"} == {*made["exact"]["sources"]}


def test_a_plan_is_gone_on_with(tiny, settings, kept, tmp_path):
    """The same command begins, finds that it has finished, and keeps the plan's digest."""
    path = kept(settings(tiny("llama"), out=None, max_steps=2))
    given = {"out": tmp_path / "planned", "resume": "auto"}
    assert run_plan(path, **given).steps == 2
    (tmp_path / "planned" / "vox_adapter.json").unlink()
    report = run_plan(path, **given, max_time="1h")
    made = json.loads((report.run / "plan.json").read_text())
    assert (report.steps, made["planned"]) == (2, json.loads(path.read_text())["digest"])
    with pytest.raises(PlanError) as caught:
        read_plan(path, {"resume": report.run})
    assert caught.value.code == "VOX-P012"


def test_another_run_than_the_one_planned_is_refused(tiny, settings, kept, data, monkeypatch):
    """Every difference is named."""
    path = kept(settings(tiny("llama"), valid=data / "valid.jsonl"))
    text = (data / "train.jsonl").read_text()
    (data / "train.jsonl").write_text(text.replace("merge", "MERGE"))
    make = core_plan.make_plan
    monkeypatch.setattr(
        core_plan,
        "make_plan",
        lambda *given, **more: replace(make(*given, **more), backend_version="9.9"),
    )
    with pytest.raises(PlanError) as caught:
        run_plan(path)
    assert caught.value.code == "VOX-P011"
    told = "\n".join(caught.value.faults)
    assert "train.jsonl has changed since the plan was made" in told
    assert "--data: the rows" in told and "planned" in told and "when it began" not in told
    assert "9.9' now" in told
    assert "valid.jsonl" not in told
    assert not read_plan(path, {}).settings.out.exists()


def test_flags_that_the_plan_decides_are_refused(tiny, settings, kept):
    path = kept(settings(tiny("llama"), rank=3))
    with pytest.raises(PlanError) as caught:
        read_plan(path, {"rank": 4, "seq_len": 64, "backend": "mlx", "max_time": "1h"})
    assert caught.value.code == "VOX-P012"
    assert caught.value.faults == ("--backend", "--rank", "--seq-len")
    with pytest.raises(ConfigError, match=r"unable to parse string as an integer\n"):
        read_plan(path, {"rank": "many"})


def test_what_is_no_plan_to_run_is_refused(tiny, settings, kept, tmp_path):
    path = kept(settings(tiny("llama")))
    good = json.loads(path.read_text())
    wrong = {
        "edited": {**good, "exact": {**good["exact"], "dtype": "bf16"}},
        "not hashed": {**good, "exact": None},
        "of another time": {**good, "format": "vox-plan/9"},
        "without what is read": {**good, "exact": {}},
        "a list": [],
    }
    for content in (*map(json.dumps, wrong.values()), "{", ""):
        path.write_text(content)
        with pytest.raises(PlanError) as caught:
            read_plan(path, {})
        assert caught.value.code == "VOX-P010"
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(tmp_path / "nowhere.json", {})
    assert plan(settings(tiny("llama"), data=[]), to_be_run=True).exact is None
    assert plan(settings(tiny("llama"))).exact is None


def test_some_steps_are_measured_and_nothing_is_kept(tiny, settings, data, tmp_path, monkeypatch):
    monkeypatch.setattr(stopwatch, "SECONDS", 1e9)  # a busy machine takes all of them, too
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    asked = settings(tiny("llama"), valid=data / "valid.jsonl", max_steps=40, eval_every=10)
    plan(asked)
    before, told = {*files_under(tmp_path)}, []
    found = plan(asked, measured=True, tell=told.append)
    assert {*files_under(tmp_path)} == before, "that of the tokens says when it was used"
    speed, work = found.speed, found.steps.work
    assert (speed.how, speed.steps) == ("measured", 8)
    assert speed.seconds == pytest.approx(work.tokens / speed.tokens_per_second)
    assert speed.loading >= 0 and speed.validating > 0
    assert speed.whole == speed.seconds + speed.loading + speed.validating
    assert speed.fast and told == ["measuring some steps of the run"]
    assert found.memory.measured > 10**8
    assert plan(asked).speed is None
    with pytest.raises(ConfigError, match="its documents"):
        plan(settings(tiny("llama"), data=[]), measured=True)
    with pytest.raises(ConfigError, match="by one process"):
        plan(settings(tiny("llama"), processes=2), measured=True)
    (data / "valid.jsonl").unlink()
    one = plan(settings(tiny("llama"), max_steps=1), measured=True).speed
    assert (one.steps, one.validating) == (1, None)


def test_an_earlier_run_of_the_same_model_says_how_long(tiny, settings, tmp_path):
    base = tiny("llama")
    first = train(settings(base, out=tmp_path / "runs" / "a"))
    asked = settings(base, out=tmp_path / "runs" / "b")
    found = plan(asked)
    told = read_run(first.run)
    assert (found.speed.how, found.speed.run) == ("earlier", str(first.run))
    assert found.speed.steps == first.steps
    assert found.speed.tokens_per_second == told.tokens_per_second
    assert found.speed.seconds == found.steps.work.tokens / told.tokens_per_second
    assert plan(settings(base, dtype="bf16", out=asked.out)).speed is None
    (first.run / "telemetry.jsonl").write_text("")
    assert plan(asked).speed is None


def test_what_was_measured_to_be_fastest_is_suggested(tiny, settings, free, monkeypatch):
    answer = Tuned(512, {}, 2.0, 1.0)
    monkeypatch.setattr(tuning_cache, "load", lambda _: answer)
    free(GB)
    found = plan(settings(tiny("llama")))
    (suggested,) = found.suggested
    assert (suggested.measured, suggested.option.micro_batch_tokens) == (True, 512)
    assert suggested.option.peak == found.memory.peak
    other = plan(settings(tiny("llama")), memory=[2 * GB]).suggested
    assert [each.measured for each in other] == [False], "another device"
    free(1000)
    assert not plan(settings(tiny("llama"))).suggested[0].measured, "it does not fit"
    monkeypatch.setattr(tuning_cache, "load", lambda _: None)
    free(GB)
    assert not plan(settings(tiny("llama"))).suggested[0].measured


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_a_merge_is_planned_too(quant, tiny, settings, tmp_path, monkeypatch):
    """Its disk to the byte that `vox merge` asks for."""
    asked = settings(tiny("llama"), quant=quant, max_steps=1)
    found = plan(asked).merge
    assert found.memory.peak == sum(found.memory.parts.values())
    assert found.memory.fits in (True, None)
    run = train(asked).run
    needed = []
    count = merging.space_needed
    monkeypatch.setattr(
        merging, "space_needed", lambda *given: needed.append(count(*given)) or needed[-1]
    )
    merge(str(run), MergeSettings(out=tmp_path / "merged"))
    assert needed == [found.disk.needed]


def test_a_plan_shows_each_finding_once(tiny, settings, data, capsys) -> None:
    long = {"prompt": "Talk?", "completion": "a word " * 99}
    with (data / "train.jsonl").open("a") as file:
        file.write("\n" + json.dumps(long))
    asked = settings(tiny("llama"), valid=data / "valid.jsonl", max_steps=1, seq_len=128)
    made = plan(asked)
    run = train(asked).run
    show(made)
    shown = capsys.readouterr()
    assert "warning: training: 1 row: cut at --seq-len in the middle of an" in shown.err
    assert f"{data / 'train.jsonl'}:7" in shown.err
    everything = shown.out + shown.err
    assert everything.count("cut-in-answer") == everything.count("cut at --seq-len") == 1
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert [line.startswith("masks ") for line in lines].count(True) == 2
    assert any("; 6 of 7 rows with a trained end-of-turn token" in line for line in lines)
    print_json(made)
    told = json.loads(capsys.readouterr().out)
    assert told["audit"] == json.loads((run / "preflight.json").read_text())["audit"]
    assert told["audit"].keys() == {"training", "validation"} and "audit" not in told["found"]
