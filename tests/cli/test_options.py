"""Flags, variables and vox.toml: who wins, and what reaches the service."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import vox_core
from tests.cli.services import Training
from vox_core.cli.options import options_of
from vox_core.config import GenerateSettings, TrainSettings, is_table, load_settings, reading
from vox_core.config.loading import PEERS
from vox_core.errors import ConfigError
from vox_core.host import Request
from vox_core.host.discover import known_plugins
from vox_core.host.load import sections

SECTIONS = [*sections(pytest.fail)]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    service = Training()
    monkeypatch.setattr("vox_core.run.train.train", service)
    return service


@pytest.fixture
def toml() -> Path:
    file = Path("vox.toml")
    file.write_text('[train]\nlr = 1e-3\nrank = 4\nbackend = "written"\n')
    return file


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_setting_is_a_flag_with_its_description(kind) -> None:
    flags = {option.name: option for option in options_of(kind)}
    assert {*flags} == {*kind.model_fields, "config_file"}
    for name, field in kind.model_fields.items():
        long = f"--{(name.removesuffix('s') if is_table(field) else name).replace('_', '-')}"
        short = ["-O"] if name == "objective_options" else [long[1:]] if len(name) == 1 else []
        assert {*flags[name].opts} == {long, *short}
        assert field.description in flags[name].help


def test_only_what_was_typed_is_given(vox, training: Training) -> None:
    vox("train", "--rank", 8, "--allow-cpu", "--data", "a", "--data", "b")
    settings = training.calls[0]["settings"]
    assert settings.model_fields_set == {"rank", "allow_cpu", "data"}
    assert (settings.rank, settings.allow_cpu) == (8, True)
    assert settings.data == (Path("a"), Path("b"))


def test_files_are_data(vox, training: Training) -> None:
    vox("train", "a.jsonl", "--rank", 8, "b.csv", "--data", "c")
    assert training.calls[0]["settings"].data == (Path("a.jsonl"), Path("b.csv"), Path("c"))


def test_a_switch_is_turned_off_by_its_opposite(vox, training: Training) -> None:
    Path("vox.toml").write_text("[train]\ngradient-checkpointing = true\n")
    for flags in ((), ("--no-gradient-checkpointing",), ("--gradient-checkpointing",)):
        vox("train", "a", *flags)
    told = [call["settings"].gradient_checkpointing for call in training.calls]
    assert told == [True, False, True]
    hint = "did you mean --no-gradient-checkpointing?"
    assert hint in vox("train", "a", "--no-gradient-checkpoint").err


def test_fields_of_a_row_are_mapped_by_flags(vox, training: Training) -> None:
    Path("vox.toml").write_text('[data.fields]\ntext = "body"\n')
    vox("train", "a", "--field", "prompt=q", "--field", "completion=a=b.0", "--field", "text=")
    assert training.calls[0]["settings"].fields == {
        "prompt": "q",
        "completion": "a=b.0",
        "text": "",
    }
    done = vox("train", "a", "--field", "prompt")
    assert done.code == 2 and "fields = prompt: found prompt, expected NAME=VALUE" in done.err


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("--learning-rate", "did you mean --lr? see `"),
        ("--lora_r", "did you mean --rank? see `"),
        ("--lora-alpha", "did you mean --alpha? see `"),
        ("--num-train-epochs", "did you mean --epochs? see `"),
        ("--per-device-train-batch-size", "did you mean --batch-size? (it counts the examples of"),
        ("--gradient_accumulation_steps", "did you mean --batch-size? (it counts the examples of"),
        ("--max-seq-length", "did you mean --seq-len? see `"),
        ("--max-length", "did you mean --seq-len? see `"),
        ("--warmup-ratio", "did you mean --warmup? see `"),
        ("--warmup-steps", "did you mean --warmup? (it is a share of all steps"),
        ("--eval-steps", "did you mean --eval-every? see `"),
        ("--save_steps", "did you mean --save-every? see `"),
        ("--checkpoint-every", "did you mean --save-every? see `"),
        ("--peft-config", "set rank, alpha, dropout, targets directly"),
        ("--output-dir", "did you mean --out? see `"),
        ("--num-generations", "did you mean --rollouts? see `"),
        ("--temperature", "did you mean --rollout-temperature? see `"),
        ("--beta", "did you mean --objective? (an option of it: -O beta=VALUE)"),
        ("--loss_type", "did you mean --objective? (an option of it: -O loss_type=VALUE)"),
        ("--max-prompt-length", "did you mean --seq-len? (the answer counts, too"),
        ("--max-completion-length", "did you mean --rollout-tokens? see `"),
        ("--train_dataset", "did you mean --data? see `"),
        ("--micro_batch_size", "did you mean --batch-size? (it counts the examples of"),
        ("--gradient_clipping", "did you mean --clip? see `"),
        ("--early_stopping_patience", "did you mean --patience? see `"),
        ("--fine-tune-type", "did you mean --method? see `"),
        ("--adapter-path", "did you mean --adapter? ("),
        ("--deepspeed", "did you mean --shard? (with "),
        ("--flash_attention", "nothing to set: the backend chooses its kernels"),
        ("--push_to_hub", "after the run: vox push RUN OWNER/NAME"),
        ("--report-to", "trackers are plugins, and need no setting"),
    ],
)
def test_the_peers_names_lead_to_the_settings_of_vox(vox, said: str, told: str) -> None:
    done = vox("train", said, "1")
    assert (done.code, f"next: {told}" in done.err) == (2, True)
    key, as_key = said[2:], told.replace("--", "").replace(" see `", "")
    Path("vox.toml").write_text(f'[train]\n{key} = "1"\n')
    assert f"- [train] {key} is unknown; {as_key}" in vox("train").err


def test_a_peers_name_of_a_setting_that_a_command_lacks_is_no_hint(vox) -> None:
    assert "--lr" not in vox("merge", "m", "--learning-rate", "1").err
    assert "--max-tokens?" in vox("generate", "m", "--max-new-tokens", "1").err


def test_a_run_of_that_name_is_meant(vox) -> None:
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/plan.json").write_text("{}")
    Path("x.jsonl").write_text('{"text": "a"}\n')
    for command in (["merge"], ["train", "x.jsonl", "--adapter"]):
        assert "next: did you mean runs/mine? " in vox(*command, "mine").err
        assert "did you mean" not in vox(*command, "other").err


def test_the_runs_in_a_folder_are_named_newest_first(vox) -> None:
    for age, name in enumerate(("new", "old", "older", "oldest")):
        plan = Path(f"runs/{name}/plan.json")
        plan.parent.mkdir(parents=True)
        plan.write_text("{}")
        os.utime(plan, (1e9 - age, 1e9 - age))
    told = "next: runs in it, newest first: runs/new, runs/old, runs/older; name a run folder"
    assert told in vox("train", "--resume", "runs").err


def test_a_peers_name_as_a_variable(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_TRAIN_LEARNING_RATE", "1")
    told = "VOX_TRAIN_LEARNING_RATE is unknown; did you mean VOX_TRAIN_LR?"
    assert told in vox("train").err


def test_help_lists_the_objectives_of_the_catalog() -> None:
    told = TrainSettings.model_fields["objective"].description or ""
    provided = [each.provides.get("objectives", ()) for each in known_plugins().values()]
    names = {name for each in provided for name in each}
    assert names and all(name in re.split(r"\W+", told) for name in names)


def test_every_hint_names_a_setting() -> None:
    known = {name.replace("_", "-") for kind in SECTIONS for name in kind.model_fields}
    assert {setting for setting, _ in PEERS.values()} <= {*known, ""}
    # That of train has a longer name; that of generate is an argument; eval has suites.
    assert known & PEERS.keys() == {"temperature", "model", "data"}


def test_rows_from_stdin_are_kept_for_another_time(vox, training: Training, monkeypatch) -> None:
    monkeypatch.setenv("VOX_CACHE", "cache")
    row = '{"prompt": "ä", "completion": "b"}\n'
    for line in (("train", "-"), ("train", "--data", "-")):
        assert "rows from stdin are stored in" in vox(*line, stdin=row).err
    first, second = (call["settings"].data for call in training.calls)
    (kept,) = first
    assert first == second and kept.read_text(encoding="utf-8") == row
    assert [*kept.parent.iterdir()] == [kept]
    empty = vox("train", "-", stdin="")
    assert (empty.code, "VOX-D002" in empty.err, len(training.calls)) == (2, True, 2)
    assert [*kept.parent.iterdir()] == [kept]


def test_a_flag_wins_over_a_variable_over_the_file(vox, training, toml, monkeypatch) -> None:
    monkeypatch.setenv("VOX_TRAIN_RANK", "5")
    vox("train", "--alpha", "7")
    monkeypatch.setenv("VOX_TRAIN_ALPHA", "6")
    vox("train", "--alpha", "7", "--rank", "6")
    first, second = (call["settings"] for call in training.calls)
    assert (first.lr, first.rank, first.alpha) == (1e-3, 5, 7)
    assert (second.lr, second.rank, second.alpha) == (1e-3, 6, 7)


def test_another_file_can_be_named(vox, training: Training, toml: Path) -> None:
    Path("other.toml").write_text("[train]\nrank = 32\n")
    vox("train", "--config", "other.toml")
    assert training.calls[0]["settings"] == TrainSettings(rank=32)


def test_a_file_that_is_not_there_is_an_error(vox, training: Training) -> None:
    done = vox("train", "--config", "nowhere.toml")
    assert (done.code, training.calls) == (2, [])
    assert "VOX-C003" in done.err


@pytest.mark.parametrize(
    ("arguments", "variables", "written", "origin"),
    [
        (["--backend", "b"], {"VOX_BACKEND": "c"}, True, "--backend"),
        ([], {"VOX_BACKEND": "c"}, True, "VOX_BACKEND"),
        ([], {"VOX_TRAIN_BACKEND": "c"}, False, "VOX_TRAIN_BACKEND"),
        ([], {}, True, "vox.toml"),
    ],
)
def test_the_settings_say_who_asked_for_the_backend(
    vox, training, toml, monkeypatch, arguments, variables, written, origin
) -> None:
    if not written:
        toml.unlink()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    vox("train", *arguments)
    backend = training.calls[0]["settings"].backend
    assert Request("train", explicit=backend).asked == f"{origin} {backend}"


def test_an_error_says_where_the_value_of_a_flag_comes_from(vox, toml, monkeypatch) -> None:
    leave_out = "- method full trains no adapter: leave out --rank"
    assert f"{leave_out} (rank from vox.toml)\n" in vox("train", "--method", "full").err
    assert f"{leave_out}\n" in vox("train", "--method", "full", "--rank", 4).err
    assert "- rank = '0': input should be greater than 0\n" in vox("train", "--rank", 0).err
    monkeypatch.setenv("VOX_TRAIN_SHARD", "1")

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("C004", "w", where="--shard", found="--lr and --seed", remedy="r")

    monkeypatch.setattr("vox_core.run.train.train", refuse)
    err = vox("train", "--rank", 4).err
    assert "where:    --shard (shard from VOX_TRAIN_SHARD)\n" in err
    assert "found:    --lr and --seed (lr from vox.toml)\n" in err
    assert "where:    --shard\n" in vox("train", "--shard").err
    error = ConfigError("C004", "w", where="--lr", remedy="r")
    for _ in ("of a rank", "of its launcher"):
        error.name_sources()
        assert error.where == "--lr (lr from vox.toml)"
    toml.rename("my.toml")
    with pytest.raises(ConfigError) as caught:
        vox_core.train(config="my.toml", shard=True)
    assert (caught.value.where, caught.value.found) == (
        "`shard`", "`lr` and `seed` (lr from my.toml)",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("quant", "4bit", "nf4"),
        ("quant", "bnb_4bit", "nf4"),
        ("quant", "qlora", "nf4"),
        ("quant", "8bit", "int8"),
        ("dtype", "bfloat16", "bf16"),
        ("dtype", "torch.float16", "fp16"),
        ("dtype", "float32", "fp32"),
        ("optimizer", "adamw_torch", "adamw"),
        ("optimizer", "paged_adamw_8bit", "adamw-8bit"),
        ("optimizer", "adamw_8bit", "adamw-8bit"),
        ("schedule", "cosine_with_restarts", "cosine"),
        ("schedule", "constant_with_warmup", "constant"),
        ("method", "qlora", "lora with quant nf4"),
    ],
)
def test_the_peers_values_lead_to_those_of_vox(vox, name: str, theirs: str, ours: str) -> None:
    hint = f"(did you mean {ours}?)"
    line = next(line for line in vox("train", f"--{name}", theirs).err.splitlines() if hint in line)
    assert line.startswith(f"  - {name} = '{theirs}': input should be ")
    with pytest.raises(ConfigError) as caught:
        vox_core.train(**{name: theirs})
    assert caught.value.faults == (line.removeprefix("  - "),)
    Path("vox.toml").write_text(f'[train]\n{name} = "{theirs}"\n')
    assert f"{line} (from vox.toml)\n" in vox("train").err


def test_a_peers_value_that_a_command_lacks_is_no_hint(vox) -> None:
    assert "did you mean" not in vox("merge", "m", "--quant", "4bit").err


def test_what_may_change_is_spelt_with_dashes_or_underscores(vox, training: Training) -> None:
    vox("train", "--resume", "a", "--allow-change", "max_steps")
    assert training.calls[0]["settings"].allow_change == ("max-steps",)


@pytest.mark.parametrize("section", ["sft", "training", "lora", "peft", "model"])
def test_a_peers_section_leads_to_train(vox, section: str) -> None:
    Path("vox.toml").write_text(f"[{section}]\nlr = 1\n")
    assert f"- [{section}] is unknown; did you mean train?\n" in vox("train").err


def test_a_peers_table_within_train_leads_to_its_settings(vox) -> None:
    Path("vox.toml").write_text("[train.lora]\nr = 8\n")
    fault = "- [train] lora is unknown; set rank, alpha, dropout, targets directly\n"
    assert fault in vox("train").err


def test_config_show_says_what_is_in_force_and_why(vox, toml: Path, monkeypatch) -> None:
    monkeypatch.setenv("VOX_TRAIN_SEED", "7")
    monkeypatch.setenv("VOX_BACKEND", "c")
    lines = [line.split() for line in vox("config", "show").out.splitlines()]
    assert ["lr", "=", "0.001", "#", "vox.toml"] in lines
    assert ["seed", "=", "7", "#", "VOX_TRAIN_SEED"] in lines
    assert ["backend", "=", '"c"', "#", "VOX_BACKEND"] in lines
    one = vox("config", "show", "train").out.splitlines()
    assert one[0] == "[train]" and ["seed", "=", "7", "#", "VOX_TRAIN_SEED"] in map(str.split, one)
    assert not any(line.startswith("[") for line in one[1:])
    hint = "there is no section trian (did you mean train?); vox config show has all of them"
    assert hint in vox("config", "show", "trian").err
    assert ["alpha", "=", "32.0", "#", "default"] in lines


def test_config_show_can_be_used_as_a_file(vox, toml: Path) -> None:
    shown = vox("config", "show")
    Path("again.toml").write_text(shown.out)
    again = vox("config", "show", "--config", "again.toml", "--json")
    assert json.loads(again.out) == json.loads(vox("config", "show", "--json").out)


def test_config_schema_knows_every_section(vox) -> None:
    schema = json.loads(vox("config", "schema").out)
    assert [*schema["properties"]] == [kind.section for kind in SECTIONS]
    assert "micro-batch-tokens" in schema["$defs"]["TrainSettings"]["properties"]


def test_a_second_module_is_no_data_file(vox, training: Training) -> None:
    done = vox("train", "--targets", "q_proj", "v_proj")
    assert done.code == 2
    assert "repeat the option: --targets v_proj" in done.err
    assert training.calls == []


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("judge.py:brief=0.50", "{}/judge.py:brief=0.5"),
        ("/shared/judge.py:brief=1", "/shared/judge.py:brief"),
        ("exact=-2e-1", "exact=-0.2"),
        ("exact=0.12345678901", "exact=0.12345678901"),
        ("exact=12e20", "exact=1.2e+21"),
    ],
)
def test_a_reward_of_vox_toml_is_a_file_beside_it(written: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "vox.toml"
    for given in (f"{written!r}", f"[{written!r}]"):
        file.write_text(f"[train]\nreward = {given}\n")
        with reading(file):
            assert load_settings(TrainSettings, {}).reward == (found.format(tmp_path),)


@pytest.mark.parametrize(
    ("written", "found"),
    [("./base", "{}/base"), ("../base", "{}/../base"), ("o/base", "o/base"), ("base", "base")],
)
def test_a_model_of_vox_toml_is_beside_it_if_it_is_a_path(written, found, tmp_path: Path) -> None:
    file = tmp_path / "vox.toml"
    file.write_text(f'[train]\nmodel = "{written}"\nteacher = "{written}"\n')
    with reading(file):
        settings = load_settings(TrainSettings, {})
    assert settings.model == settings.teacher == found.format(tmp_path)
    file.write_text('[generate]\nsystem = "./run.sh lists files"\nstop = "./"\n')
    with reading(file):
        kept = load_settings(GenerateSettings, {})
    assert (kept.system, kept.stop) == ("./run.sh lists files", ("./",)), "texts stay"


@pytest.mark.parametrize("given", [len, [len], ["exact", len], 3])
def test_a_reward_that_is_no_text_is_told_how_to_name_a_function(given: object) -> None:
    with pytest.raises(ConfigError, match="give NAME or FILE"):
        load_settings(TrainSettings, {"reward": given})


@pytest.mark.parametrize("written", ["3", "[3]", "true", "{a=1}", '[["a"]]', '"exact=1e400"'])
def test_a_reward_of_vox_toml_that_is_none_is_refused(written: str, tmp_path: Path) -> None:
    file = tmp_path / "vox.toml"
    file.write_text(f"[train]\nreward = {written}\n")
    with reading(file), pytest.raises(ConfigError, match="give NAME or FILE"):
        load_settings(TrainSettings, {})


def test_a_key_of_another_section_is_told_its_home(tmp_path: Path) -> None:
    """`[train]` takes those of `[data]` as flags; a key that neither has is only misspelt."""
    file = tmp_path / "vox.toml"
    file.write_text("[train]\nvalid_share = 0.1\nmax_steps = 3\nlearning-rate = 1\n")
    with reading(file), pytest.raises(ConfigError) as caught:
        load_settings(TrainSettings, {})
    home, own, near = caught.value.faults
    assert home == "[train] valid_share is unknown; put valid-share under [data]"
    assert own == "[train] max_steps is unknown; did you mean max-steps?"
    assert near == "[train] learning-rate is unknown; did you mean lr?"
