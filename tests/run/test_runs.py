"""A run from the outside: its files, its events, its refusals, its stop and its resume."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.run.lines import read
from vox_core import models
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.config import MergeSettings, SamplingSettings, TrainSettings, validate
from vox_core.contract import (
    CheckpointWritten,
    Event,
    FastPaths,
    RunEnd,
    RunStart,
    StepDone,
    Validation,
)
from vox_core.contract.spec import digest_of
from vox_core.data.formats import keep_rows
from vox_core.errors import AdapterError, InputError, ProofError, StorageError
from vox_core.run import checkpoint
from vox_core.run.load import open_model
from vox_core.run.merge import merge
from vox_core.run.proof import prove
from vox_core.run.reference import resolve_reference
from vox_core.run.run_plan import plan_run
from vox_core.run.session import Session
from vox_core.run.train import train


def test_a_run_folder_holds_what_the_design_says(tiny, settings):
    events: list[Event] = []
    report = train(settings(tiny("llama"), save_every=2), observe=events.append)
    names = {path.name for path in report.run.iterdir()}
    assert {
        "plan.json",
        "preflight.json",
        "telemetry.jsonl",
        "checkpoints",
        "adapter_model.safetensors",
        "adapter_config.json",
        "vox_adapter.json",
        "tokenizer.json",
        "README.md",
    } <= names
    assert not [name for name in names if name.startswith(".tmp")]
    kinds = [type(event) for event in events if event.name != "notice"]
    step = StepDone
    assert kinds[:3] == [RunStart, FastPaths, Validation]
    # A checkpoint is written beside the steps after its own, and announced at one of them.
    written = [event.step for event in events if isinstance(event, CheckpointWritten)]
    assert written == [2, 4, 5]
    assert kinds[3:7].count(step) >= 3
    assert kinds.index(CheckpointWritten) > 4
    assert kinds[-2:] == [CheckpointWritten, RunEnd]
    assert [p.name for p in checkpoint.numbered(report.run / "checkpoints")] == ["step-5", "step-4"]
    lines = read(report.run / "telemetry.jsonl")
    (first, *_) = [line for line in lines if line["event"] == "step"]
    assert {"step", "loss", "lr", "grad_norm", "tokens", "trained_tokens", "tokens_per_second"} <= (
        first.keys()
    )
    assert first["step"] == 1
    plan = json.loads((report.run / "plan.json").read_text())
    manifest = json.loads((report.run / "vox_adapter.json").read_text())
    assert plan["digest"] == manifest["contract"]


def test_the_first_step_of_a_command_says_how_long_it_took_to_get_there(tiny, settings):
    began = time.perf_counter()
    report = train(settings(tiny("llama"), max_steps=3))
    told = [line for line in read(report.run / "telemetry.jsonl") if "step" in line]
    seconds = [line.get("startup_seconds") for line in told if line["event"] == "step"]
    assert seconds == [report.startup_seconds, None, None]
    assert 0 < report.startup_seconds < report.seconds < time.perf_counter() - began


def test_the_plan_knows_the_longest_document_of_training_and_validation(tiny, settings, data):
    base = tiny("llama")
    made = settings(base, max_steps=1, valid=data / "valid.jsonl")
    planned = plan_run(made)
    documents = [*planned.data.train, *planned.data.valid]
    assert planned.execution.longest == max(map(len, documents))
    row = {"prompt": "Longer?", "completion": "Yes, " * 40}
    (data / "valid.jsonl").write_text(json.dumps(row))
    longer = plan_run(made)
    assert longer.execution.longest == len(longer.data.valid[0])
    assert longer.execution.longest > planned.execution.longest
    assert (
        json.loads((train(made).run / "plan.json").read_text())["longest"]
        == longer.execution.longest
    )


def test_the_contract_is_free_of_paths_and_follows_the_content(tiny, settings, tmp_path, data):
    def digest(name: str, model, **given: object) -> str:
        made = settings(model, out=tmp_path / name, max_steps=1, **given)
        run = train(made).run
        return json.loads((run / "plan.json").read_text())["digest"]

    base = tiny("llama")
    moved = shutil.copytree(base, tmp_path / "elsewhere")
    copied = shutil.copytree(data, tmp_path / "copied")
    first = digest("a", base)
    assert digest("b", moved, data=[copied], micro_batch_tokens=64) == first
    assert digest("c", base, seed=1) != first
    assert digest("d", base, lr=1e-3) != first
    assert digest("e", tiny("llama", seed=1)) != first
    (copied / "train.jsonl").write_text((data / "valid.jsonl").read_text())
    assert digest("f", base, data=[copied]) != first


def test_interrupted_and_resumed_is_the_run_that_would_have_been(tiny, settings, tmp_path):
    model = tiny("llama")
    whole = train(settings(model, out=tmp_path / "whole", max_steps=6, dropout=0.1))
    run = tmp_path / "cut"
    command = [sys.executable, "-m", "vox_core.cli", "train", "--model", str(model)]
    flags = settings(model).model_dump(include={"data", "dtype", "batch_size", "lr", "rank"})
    for key, value in {**flags, "alpha": 8, "max_steps": 6, "dropout": 0.1, "out": run}.items():
        for one in value if isinstance(value, tuple) else [value]:
            command += [f"--{key.replace('_', '-')}", str(one)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not any(line["event"] == "step" for line in read(run / "telemetry.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    if process.returncode == 130:
        assert f"vox train --resume {run}" in errors
        report = train(validate(TrainSettings, {"resume": run}))
        assert report.steps == 6
    else:  # the last step was done before the signal came
        assert process.returncode == 0
    for name, value in read_adapter(whole.run).tensors().items():
        assert np.array_equal(read_adapter(run).tensors()[name], value), name

    def curve(folder) -> list[float]:
        lines = read(folder / "telemetry.jsonl")
        return [line["loss"] for line in lines if line["event"] == "step"]

    assert curve(run) == curve(whole.run)


def unfinished(run):
    """The run as a crash would have left it: checkpoints, and no adapter yet."""
    for name in ("vox_adapter.json", "adapter_config.json", "adapter_model.safetensors"):
        (run / name).unlink()
    return run


def test_a_finished_run_is_not_gone_on_with(tiny, settings):
    report = train(settings(tiny("llama"), max_steps=2))
    with pytest.raises(InputError, match="finished already"):
        train(validate(TrainSettings, {"resume": report.run}))


def test_a_resume_under_another_contract_names_what_changed(tiny, settings):
    report = train(settings(tiny("llama")))
    unfinished(report.run)
    with pytest.raises(InputError) as caught:
        train(validate(TrainSettings, {"resume": report.run, "lr": 5e-3, "rank": 8}))
    assert caught.value.code == "VOX-P003"
    assert [fault.split(":")[0] for fault in caught.value.faults] == [
        "--rank",
        "--lr",
    ]


def test_a_damaged_checkpoint_is_passed_over_and_named(tiny, settings):
    report = train(settings(tiny("llama"), save_every=2))
    newest, older = checkpoint.numbered(report.run / "checkpoints")
    path = newest / "moments.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    state, skipped = checkpoint.load_newest(report.run / "checkpoints")
    assert f"step-{state.step}" == older.name
    assert skipped == [f"{newest.name}: moments.safetensors is not what MANIFEST.json says"]


def test_a_resume_past_a_damaged_checkpoint_and_a_torn_line(tiny, settings, tmp_path):
    whole = train(settings(tiny("llama"), out=tmp_path / "whole", save_every=2))
    run = unfinished(train(settings(tiny("llama"), save_every=2)).run)
    (newest, *_) = checkpoint.numbered(run / "checkpoints")
    path = newest / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    with (run / "telemetry.jsonl").open("a") as file:
        file.write('{"event": "st')
    for inside in (newest, newest.parent):
        with pytest.raises(InputError, match=f"vox train --resume {run.resolve()}"):
            train(validate(TrainSettings, {"resume": inside}))
    notices: list[Event] = []
    report = train(validate(TrainSettings, {"resume": run}), observe=notices.append)
    assert report.steps == 5
    assert any("set aside" in getattr(event, "message", "") for event in notices)
    state, skipped = checkpoint.load_newest(run / "checkpoints")
    assert (state.step, skipped) == (5, [])
    for name, value in read_adapter(whole.run).tensors().items():
        assert np.array_equal(read_adapter(run).tensors()[name], value), name


@pytest.mark.foreign_telemetry
def test_of_two_runs_that_want_one_folder_the_second_leaves_it_alone(tiny, settings, tmp_path):
    plan = plan_run(settings(tiny("llama"), out=tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "telemetry.jsonl").write_text("mine\n")
    with pytest.raises(InputError) as caught, Session.open(plan, print, 0.0):
        pass
    assert caught.value.code == "VOX-O001"
    assert (tmp_path / "run" / "telemetry.jsonl").read_text() == "mine\n"


def test_bad_input_that_turns_up_late_costs_no_finished_step(tiny, settings, monkeypatch):
    from vox_core.run import checkpoint as checkpoints

    def late(*_: object) -> None:
        raise AdapterError("A003", "found late", remedy="none")

    save = checkpoints.save
    monkeypatch.setattr(
        checkpoints, "save", lambda p, s, o: save(p, s, o) if s.step < 4 else late()
    )
    made = settings(tiny("llama"), save_every=2)
    with pytest.raises(AdapterError, match="found late"):
        train(made)
    assert [p.name for p in checkpoint.numbered(made.out / "checkpoints")] == ["step-2"]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"targets": ["no_such_module"]}, "VOX-P002"),
        ({"seq_len": 100_000}, "VOX-P001"),
        ({"modules_to_save": ["nothing"]}, "VOX-P001"),
        ({"backend": "nowhere"}, "VOX-B003"),
        ({"dtype": "fp16", "backend": "cpu"}, "VOX-B002"),
        ({"data": []}, "VOX-C004"),
        ({"model": "no/such/folder"}, "VOX-M001"),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_written(tiny, settings, given, code):
    made = settings(tiny("llama"), **given)
    with pytest.raises(InputError) as caught:
        train(made)
    assert caught.value.code == code
    assert not made.out.exists()


def test_training_whole_what_the_model_ties_is_refused(tiny, settings):
    with pytest.raises(InputError, match="cannot be trained with this model") as caught:
        train(settings(tiny("qwen2"), modules_to_save=["embed_tokens"]))
    assert "ties" in caught.value.faults[0]


def test_an_existing_output_folder_is_refused_and_left_alone(tiny, settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("precious")
    with pytest.raises(InputError) as caught:
        train(settings(tiny("llama")))
    assert caught.value.code == "VOX-O001"
    assert (tmp_path / "run" / "mine").read_text() == "precious"


def test_a_truncated_model_is_refused(tiny, settings, tmp_path):
    broken = shutil.copytree(tiny("llama"), tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError) as caught:
        train(settings(broken))
    assert caught.value.code == "VOX-M003"


def test_a_foreign_adapter_is_refused(tiny, settings, tmp_path):
    report = train(settings(tiny("llama")))
    with pytest.raises(AdapterError) as shapes:
        merge(str(report.run), MergeSettings(model=str(tiny("gpt2")), out=tmp_path / "m"))
    assert len(shapes.value.faults) == 14
    other = tiny("llama", seed=1)
    with pytest.raises(AdapterError, match="another base model"):
        merge(str(report.run), MergeSettings(model=str(other), out=tmp_path / "m"))
    assert not (tmp_path / "m").exists()


def test_an_adapter_names_its_base_by_the_hub_id_and_says_whose_weights_it_saw(
    tiny, settings, tmp_path, monkeypatch
):
    """Of a model of the catalog, whose weights are a conversion of the hub's."""
    resolve, base = models.resolve, tiny("llama")

    def of_the_catalog(reference: str, **given: object) -> models.LocalModel:
        return replace(resolve(str(base), **given), id="small", revision="f" * 64, hub="org/Small")

    monkeypatch.setattr(models, "resolve", of_the_catalog)
    run = train(settings(base, model="small", max_steps=2)).run
    monkeypatch.setattr(models, "resolve", resolve)
    assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "org/Small"
    )
    manifest = json.loads((run / "vox_adapter.json").read_text())["base"]
    assert (manifest["id"], manifest["hub"], manifest["path"]) == ("small", "org/Small", str(base))
    card = (run / "README.md").read_text()
    assert "base_model: org/Small\n" in card and "`small` in vox's catalog (SHA-256 fff" in card
    assert resolve_reference(str(run)).base.hub == "org/Small"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(manifest["path"]), run)
    merge(str(run), MergeSettings(out=tmp_path / "m"))
    assert "base_model: org/Small\n" in (tmp_path / "m" / "README.md").read_text()


def test_cards_are_yaml_whatever_the_name_of_the_base_is(tiny, settings, tmp_path):
    base = shutil.copytree(tiny("llama"), tmp_path / "base: 2 #b")
    run = train(settings(base, max_steps=1)).run
    merge(str(run), MergeSettings(out=tmp_path / "m"))
    for folder in (run, tmp_path / "m"):
        assert ModelCard.load(folder / "README.md").data.base_model == base.name


def rewritten(run, change) -> None:
    """The run's adapter with other values."""
    state, source = read_adapter(run), resolve_reference(str(run))
    changed = state.with_tensors({n: change(n, v) for n, v in state.tensors().items()})
    write_adapter(run, changed, base=str(source.base.path), modules=source.modules)


def test_a_killed_process_leaves_no_temporary_folder(tiny, settings, tmp_path, monkeypatch):
    """None is there while it works."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    there: list[Path] = []
    run = str(
        train(settings(tiny("llama")), observe=lambda _: there.extend(place.glob("vox-*"))).run
    )
    with open_model(run, SamplingSettings()):
        there += place.glob("vox-*")
    merge(run, MergeSettings(), observe=lambda _: there.extend(place.glob("vox-*")))
    assert there == []


def test_loading_is_announced_before_it_begins(tiny, settings, tmp_path, monkeypatch):
    run, said = str(train(settings(tiny("llama"))).run), []

    def load_tokenizer(folder):
        assert said[-1].message == "loading the tokenizer …"
        raise LookupError

    monkeypatch.setattr("vox_core.run.load.load_tokenizer", load_tokenizer)
    monkeypatch.setattr("vox_core.run.merge.load_tokenizer", load_tokenizer)
    with pytest.raises(LookupError):
        open_model(run, SamplingSettings(), observe=said.append).__enter__()
    with pytest.raises(LookupError):
        merge(run, MergeSettings(out=tmp_path / "m"), observe=said.append)


def test_an_adapter_that_changes_nothing_fails_and_leaves_nothing(tiny, settings, tmp_path):
    report = train(settings(tiny("llama")))
    rewritten(report.run, lambda name, value: value * (".lora_B." not in name))
    with pytest.raises(ProofError) as caught:
        merge(str(report.run), MergeSettings(out=tmp_path / "m"))
    assert caught.value.code == "VOX-V002"
    assert not list(tmp_path.glob("*m*"))


def test_a_merge_says_what_survives_rounding_and_refuses_next_to_nothing(tiny, settings, tmp_path):
    report = train(settings(tiny("llama", dtype="bfloat16")))
    rewritten(report.run, lambda name, value: value * (0.02 if ".lora_B." in name else 1))
    proof = merge(str(report.run), MergeSettings(out=tmp_path / "most")).proof
    assert (proof.dtype, 0.3 < proof.carried < 0.9) == ("bf16", True)
    rewritten(report.run, lambda name, value: value * (0.05 if ".lora_B." in name else 1))
    with pytest.raises(ProofError, match="next to nothing") as caught:
        merge(str(report.run), MergeSettings(out=tmp_path / "m"))
    assert "--dtype fp32" in caught.value.remedy
    proof = merge(str(report.run), MergeSettings(out=tmp_path / "m", dtype="fp32")).proof
    assert (proof.dtype, proof.carried) == ("fp32", pytest.approx(1, abs=1e-3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "kept", "noise", "refused"),
    [
        ("BF16", 0.5, 0.0, None),
        ("BF16", 0.05, 0.0, "next to nothing of the adapter survives rounding to bf16"),
        ("BF16", 2.5, 0.0, "does not reproduce"),
        ("BF16", 1.0, 0.1, "does not reproduce"),
        ("F32", 0.85, 0.0, "does not reproduce"),
        ("F32", 1.0, 0.0, None),
    ],
)
def test_what_rounding_explains_is_no_fault_of_a_merge(dtype, kept, noise, refused):
    """Logits whose adapter has an effect of 1e-5, of which a share is in the merged model."""
    base, effect = np.ones((2, 50)), 1e-5 * np.resize([1.0, -1.0], (2, 50))
    merged = base + kept * effect + noise * np.resize([1.0, 1.0, -1.0, -1.0], (2, 50))
    if refused is None:
        assert prove(base, base + effect, merged, dtype, 7).carried == pytest.approx(kept)
        return
    with pytest.raises(ProofError, match=refused) as caught:
        prove(base, base + effect, merged, dtype, 7)
    assert caught.value.code == "VOX-V001"


@pytest.mark.parametrize(("positions", "refused"), [(1, False), (3, True)])
def test_single_tokens_may_go_to_other_experts(positions, refused):
    """Rounding tips the choice of a router at a position or two; a fault is at every one."""
    base, effect = np.ones((4, 50)), 0.1 * np.resize([1.0, -1.0], (4, 50))
    merged = base + effect
    merged[:positions] += 0.06 * np.resize([1.0, 1.0, -1.0, -1.0], (positions, 50))
    if not refused:
        assert prove(base, base + effect, merged, "BF16", 7).relative == 0
        return
    with pytest.raises(ProofError, match="does not reproduce"):
        prove(base, base + effect, merged, "BF16", 7)


@pytest.mark.parametrize("size", [1, 0.02], ids=["", "mostly rounded away"])
@pytest.mark.parametrize("mutant", ["dropped", "unscaled", "one layer's v_proj dropped"])
def test_a_merge_that_is_wrong_fails_its_proof(tiny, settings, tmp_path, monkeypatch, mutant, size):
    from vox_torch import merge as engine

    def wrong(W_PI, adapter, path, block):
        module = adapter.modules[path]
        left_out = mutant == "dropped" or path.endswith("layers.1.self_attn.v_proj")
        scale = 1.0 if mutant == "unscaled" else adapter.scale(path) * (not left_out)
        W_PI += engine.float32(scale * (module.B_OR[block] @ module.A_RI))

    report = train(settings(tiny("llama", dtype="bfloat16")))
    rewritten(report.run, lambda name, value: value * (size if ".lora_B." in name else 1))
    monkeypatch.setattr(engine, "_add_update", wrong)
    with pytest.raises(ProofError) as caught:
        merge(str(report.run), MergeSettings(out=tmp_path / "m"))
    assert caught.value.code == "VOX-V001"
    assert not list(tmp_path.glob("*m*"))


def test_a_full_disk_ends_a_merge_with_nothing_left(tiny, settings, tmp_path, monkeypatch):
    report = train(settings(tiny("llama")))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError) as caught:
        merge(str(report.run), MergeSettings(out=tmp_path / "m"))
    assert caught.value.code == "VOX-S001"
    assert caught.value.exit_code == 1
    assert not list(tmp_path.glob("*m*"))


def test_a_resumed_run_on_a_full_disk_is_not_sent_to_another(tiny, settings, monkeypatch):
    asked = settings(tiny("llama"), save_every=2)
    new = asked.model_copy(update={"out": asked.out.with_name("new")})
    goes_on = validate(TrainSettings, {"resume": unfinished(train(asked).run)})
    monkeypatch.setattr("vox_core.run.run_plan.space_needed", lambda _: 10**18)
    for given, out in ((new, True), (goes_on, False)):
        with pytest.raises(StorageError) as full:
            train(given)
        assert full.value.remedy.startswith("free space on that disk")
        assert ("--out" in full.value.remedy) == out


def test_a_prompt_longer_than_the_model_can_read_is_refused(tiny):
    made = validate(Greedy, {"max_tokens": 5})
    with open_model(str(tiny("gpt2")), made) as model:
        with pytest.raises(InputError, match="longer than the model can read"):
            list(model.reply([{"role": "user", "content": "x" * 600}]))
        assert len("".join(model.reply([{"role": "user", "content": "x" * 480}]))) <= 5


@pytest.mark.skipif(sys.platform == "darwin", reason="its names are UTF-8")
def test_folders_whose_names_are_not_utf8(tiny, settings, tmp_path, data):
    """As of an archive that was made in Latin-1."""
    named = data.rename(tmp_path / os.fsdecode("Gespräche".encode("latin-1")))
    out = tmp_path / os.fsdecode(b"l\xe4uft")
    asked = settings(tiny("llama"), data=[named], out=out, max_steps=2)
    assert digest_of({"data": str(named)})  # of a plan
    assert train(asked).steps == 2
    again = validate(TrainSettings, {"resume": out, "max_steps": 3, "allow_change": ["max-steps"]})
    assert train(again).steps == 3


def test_two_processes_cannot_work_in_one_run_folder(tiny, settings, tmp_path):
    from vox_core.run.folder import RunFolder, locked

    report = train(settings(tiny("llama"), max_steps=2))
    unfinished(report.run)
    with locked(RunFolder(report.run)), pytest.raises(InputError) as caught:
        train(validate(TrainSettings, {"resume": report.run}))
    assert caught.value.code == "VOX-O003"


def test_a_run_keeps_its_template(tiny, settings, tmp_path, monkeypatch):
    """A base without one: trained, asked and merged under the same; part of the contract."""
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    base, data = tmp_path / "base", tmp_path / "chats.jsonl"
    shutil.copytree(tiny("llama"), base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(InputError, match="--template chatml"):
        train(settings(base, data=data, max_steps=2))
    run = train(settings(base, data=data, max_steps=2, template="chatml")).run
    out = tmp_path / "other"
    other = plan_run(settings(base, data=data, max_steps=2, template="alpaca", out=out))
    plan = json.loads((run / "plan.json").read_text())
    assert plan["settings"]["template"] == "chatml"
    assert other.contract.model.tokenizer_digest != plan["contract"]["model"]["tokenizer_digest"]
    assert other.data.train.digest != plan["contract"]["data"]["digest"]
    template = (run / "chat_template.jinja").read_text()
    assert "<|im_end|>" in template
    with open_model(str(run), SamplingSettings(max_tokens=1)) as model:
        # A token for each byte, and one for each of the three markers.
        assert model.reply(turns[:1]).prompt_tokens == len("user\nHi\nassistant\n") + 3
    merged = merge(str(run), MergeSettings(dtype="fp32")).out
    assert (merged / "chat_template.jinja").read_text() == template
    assert json.loads((merged / "generation_config.json").read_text())["eos_token_id"] == [258]
    again = settings(base, data=data, max_steps=2, template="alpaca", out=None, resume=run)
    with pytest.raises(InputError, match="--model or --template: the tokenizer"):
        train(again.model_copy(update={"allow_change": ("epochs",)}))


def test_rows_from_stdin_are_there_for_a_resume(tiny, settings, tmp_path, data, monkeypatch):
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    rows = (data / "train.jsonl").read_bytes()
    kept = keep_rows(io.BytesIO(rows), "stdin")
    given = settings(tiny("llama"), data=kept, max_steps=3, max_time=0.0001, save_every=1)
    report = train(given)
    run = report.run
    assert report.steps == 1  # after less time than it took to begin
    kept.unlink()
    again = validate(TrainSettings, {"resume": run})
    with pytest.raises(InputError, match="the copy of rows that came from stdin or Python is gone"):
        train(again)
    assert keep_rows(io.BytesIO(rows), "stdin") == kept
    assert train(again).steps == 3


def test_a_damaged_copy_of_rows_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    kept = keep_rows([b"{}\n"], "stdin")
    before = kept.stat().st_ino
    assert keep_rows([b"{}\n"], "stdin").stat().st_ino == before, "a run may be reading it"
    kept.write_bytes(b"{")
    assert keep_rows([b"{}\n"], "stdin").read_bytes() == b"{}\n"


def test_an_adapter_can_be_left_out(tiny, settings):
    report = train(settings(tiny("llama"), max_steps=20))
    say = [{"role": "user", "content": "How do I merge?"}]

    def answer(reference: str, **given: object) -> str:
        made = validate(Greedy, {"max_tokens": 12, "dtype": "fp32", **given})
        with open_model(reference, made) as model:
            return "".join(model.reply(say))

    base = answer(str(tiny("llama")))
    assert answer(str(report.run), adapter="none") == base
    assert answer(str(report.run)) != base


class Greedy(SamplingSettings):
    section = "generate"
