"""`import vox_core as vox`, on tiny models through the real CPU backend."""

from __future__ import annotations

import _thread
import importlib
import json
import os
import pickle
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest

import vox_core as vox
from tests.run.conftest import TALK
from vox_core.cli import failures, root
from vox_core.config.loading import in_python, reading
from vox_core.contract import Event, Notice, RunEnd, StepDone
from vox_core.errors import AdapterError, BackendError, ConfigError, DataError, InputError, VoxError
from vox_core.run.session import StoppedAtOnce

QUICK = {"dtype": "fp32", "batch_size": 2, "lr": 1e-2, "rank": 4, "alpha": 8, "backend": "cpu"}


@pytest.fixture(autouse=True)
def _within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> vox.Run:
    folder = tmp_path_factory.mktemp("trained")
    rows = [json.dumps({"prompt": question, "completion": answer}) for question, answer in TALK]
    (folder / "train.jsonl").write_text("\n".join(rows))
    data, out = folder / "train.jsonl", folder / "runs/a"
    return vox.train(model=tiny("llama"), data=data, out=out, max_steps=3, **QUICK)


def test_a_run_has_its_folder_losses_and_report(trained: vox.Run) -> None:
    assert len(trained.losses) == trained.report.steps == 3
    assert trained.losses[-1] == trained.report.loss
    (found,) = vox.runs(trained.path.parent)
    assert (found.run, found.status) == (str(trained.path), "done")
    assert found.losses == [*enumerate(trained.losses, 1)]


def test_waiting_threads_leave_the_core_to_others() -> None:
    """Said before torch is imported, which reads it then."""
    code = "import os, vox_core; before = dict(os.environ); vox_core.train; "
    code += "print(before.get('GOMP_SPINCOUNT'), os.environ['GOMP_SPINCOUNT'])"
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", vox.SPIN_COUNT]


def test_what_was_trained_answers(trained: vox.Run, tiny: Callable[..., Path]) -> None:
    with trained.load(dtype="fp32", max_tokens=8) as model:
        assert model.title.endswith("+ adapter")
        answer = model.generate("How do I merge?")
        assert (
            answer
            == model.generate("How do I merge?")
            == model.chat([{"role": "user", "content": "How do I merge?"}], temperature=0, top_p=1)
        )
        assert answer.startswith(model.generate("How do I merge?", max_tokens=2))
        questions = ["How do I merge?", [{"role": "user", "content": "Talk?"}], "Stop?"]
        alone = ["".join(model.stream(question)) for question in questions]
        assert model.generate(questions) == alone
        assert alone[0] == answer
        assert model.generate(questions[1]) == alone[1], "one conversation has one answer"
        for wrong in ({"prompt": "Talk?"}, [{"prompt": "Talk?"}], ["Talk?", {"prompt": "Talk?"}]):
            with pytest.raises(DataError, match="D003"):
                model.generate(wrong)
        found = list(model.answers(["Talk?"] * 2, n=2, temperature=2.0, out="answers.jsonl"))
        assert [(each.row, each.index) for each in found] == [(1, 0), (1, 1), (2, 0), (2, 1)]
        assert len({each.answer for each in found}) > 1
        again = model.answers(["Talk?"] * 2, n=2, temperature=2.0, out="answers.jsonl")
        assert list(again) == found
        pieces = model.stream("How do I merge?")
        assert ("".join(pieces), pieces.completion_tokens) == (answer, 8)
        # As `[chat]` samples: another seed is another answer.
        assert len({model.chat("Talk?", seed=seed, temperature=5.0) for seed in range(4)}) > 1
        with pytest.raises(ConfigError, match="load it again"):
            model.generate("Hi", dtype="bf16")
        for prompts in ("Hi", ["Hi"]):
            with pytest.raises(ConfigError, match=r"answers\(prompts, n=2\)"):
                model.generate(prompts, n=2)
        with pytest.raises(DataError):
            model.generate("too long " * 10_000)
    base = vox.load(tiny("llama"), dtype="fp32", max_tokens=8)
    assert base.generate("How do I merge?") != answer
    base.close()
    base.close()
    with pytest.raises(ConfigError, match="closed"):
        base.chat("What is 3?")


def test_what_is_no_conversation_is_refused(trained: vox.Run) -> None:
    with trained.load(dtype="fp32", max_tokens=1) as model:
        for messages, words in [
            ([], "found no message"),
            ([{"role": "usr", "content": "Talk?"}], 'found "usr" as'),
            ([{"role": "user"}], "found null"),
            (["Talk?"], "expected an object"),
            ({"role": "user", "content": "Talk?"}, 'an object as "messages", expected a list'),
            (None, 'null as "messages", expected a list'),
            ("", "text of the user"),
        ]:
            with pytest.raises(DataError, match=words):
                model.chat(messages)
        silent = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "\n"}]
        assert isinstance(model.chat([*silent, *silent[:1]]), str)


def test_a_run_is_merged_and_the_result_is_a_model(trained: vox.Run, capfd) -> None:
    report = trained.merge(dtype="fp32")
    assert report.out == trained.path.with_name("a-merged")
    assert vox.merge(trained.path, "elsewhere").out == Path("elsewhere")
    with vox.load(report.out, dtype="fp32", max_tokens=4) as merged, vox.load(trained) as model:
        assert merged.generate("Talk?") == model.generate("Talk?", max_tokens=4)
    assert capfd.readouterr() == ("", ""), "nothing is printed"


class Frame:
    """Rows as a `datasets.Dataset` gives them, and a comparison as a data frame has it."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_rows_of_python_train_as_those_of_a_file(
    trained: vox.Run, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": question, "completion": answer} for question, answer in TALK]
    settings = {"model": tiny("llama"), "max_steps": 3, **QUICK}
    (tmp_path / "some").mkdir()
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "some/rows.jsonl").write_text("\n".join(lines))
    globbed = Path("some").glob("*.jsonl")
    for name, given in {
        "list": rows, "frame": Frame(rows), "once": iter(rows), "files": globbed
    }.items():  # fmt: skip
        run = vox.train(data=given, out=name, **settings)
        assert run.losses == trained.losses, name
    held_out = vox.train(data=rows, valid=rows[:2], out="valid", **settings)
    assert held_out.report.valid_after is not None
    stopped = vox.train(data=rows, out="stopped", max_time=1e-4, **settings)
    assert stopped.report.stopped
    for copy in (tmp_path / "cache/given").iterdir():
        copy.unlink()
    with pytest.raises(DataError, match="the copy of rows that came from stdin or Python is gone"):
        vox.train(resume=stopped)
    assert vox.train(resume=stopped, data=rows).losses == trained.losses


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "a"}, {"text": Path()}], "row 2"),
        ([{"text": "a"}, "b"], "str, which is no row"),
        ({"train": [{"text": "a"}]}, "of a DatasetDict give one split"),
        (Frame([]), "there is no data"),
        (iter(()), "there is no data"),
        ([{"text": float("nan")}], "not JSON compliant"),
        ([], "no --data|no data"),
        (0.1, "data.0 = 0.1"),
    ],
)
def test_rows_of_python_that_are_none(
    rows: Any, words: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError) as raised:
        vox.train(model=tiny("llama"), data=rows, **QUICK)
    assert re.search(words, str(raised.value)), str(raised.value)
    assert not (tmp_path / "runs").exists()
    given = tmp_path / "cache/given"
    assert not given.exists() or not [*given.iterdir()]


def test_faults_of_rows_of_python_name_the_row_and_not_its_copy(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    rows = [{"text": "a"}, {"txt": "b"}, {"text": ""}, *[{"text": "", "n": n} for n in range(6)]]
    with pytest.raises(DataError) as raised:
        vox.train(model=tiny("llama"), data=rows, **QUICK)
    first, second = raised.value.faults
    assert first.startswith("the given rows, row 2: found the fields txt, expected one of")
    assert second.startswith("the given rows, row 3, 4, 5, 6, 7 and 2 more: found nothing in")
    assert raised.value.where == "the given rows"
    with pytest.raises(DataError) as raised:
        vox.train(model=tiny("llama"), data=[{"text": "a"}], min_rating=3, **QUICK)
    assert raised.value.where == "the given rows"
    told: list[object] = []
    rated = [{"text": "a", "rating": 5}, {"text": "b", "rating": 1}]
    vox.train(
        model=tiny("llama"), data=rated, min_rating=3, max_steps=1, on_event=told.append, **QUICK
    )
    notices = [each.message for each in told if isinstance(each, Notice)]
    start = "the given rows: 1 of 2 rows are used; "
    assert [each for each in notices if each.startswith(start)], notices


def test_events_come_by_callback_and_ctrl_c_keeps_the_run(
    tiny: Callable[..., Path], data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Event] = []

    def interrupt(event: Event) -> None:
        seen.append(event)
        if isinstance(event, StepDone) and event.step == 2:
            _thread.interrupt_main()  # what Ctrl-C does, and the interrupt of a notebook

    settings = {"model": tiny("llama"), "data": data, "max_steps": 5, **QUICK}
    whole = vox.train(**settings, out="whole")
    stopped = vox.train(**settings, out="a", on_event=interrupt)
    assert stopped.report.stopped
    assert 2 <= stopped.report.steps < 5
    assert isinstance(seen[-1], RunEnd)
    assert (stopped.path / "checkpoints").is_dir()
    resumed = vox.train(resume=stopped)
    assert not resumed.report.stopped
    with pytest.raises(ConfigError) as caught:
        vox.train(resume=stopped, allow_change=["rank"])
    assert caught.value.faults[0].startswith("allow_change.0 = 'rank': input should be 'clip'")
    assert resumed.losses == whole.losses
    longer = vox.train(resume=stopped, allow_change="max_steps", max_steps=6)
    assert longer.report.steps == 6
    assert capfd.readouterr() == ("", ""), "nothing is printed"


@pytest.mark.parametrize("name", ["run_start", "step", "validation"])
def test_an_error_of_a_callback_reaches_the_caller(
    tiny: Callable[..., Path], data: Path, tmp_path: Path, name: str
) -> None:
    """Also from within the backend, whose own errors are reported as the plugin's."""

    def refuse(event: Event) -> None:
        if event.name == name:
            raise LookupError(name)

    out = tmp_path / "run"
    with pytest.raises(LookupError, match=name):
        vox.train(model=tiny("llama"), data=data, max_steps=1, on_event=refuse, out=out, **QUICK)
    assert '"outcome": "failed"' in (out / "telemetry.jsonl").read_text()


def test_a_run_that_a_bug_ends_has_failed(
    tiny: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vox_core.run.loop.steps_of", Mock(side_effect=LookupError("a bug")))
    with pytest.raises(LookupError, match="a bug"):
        vox.train(model=tiny("llama"), data=data, max_steps=1, out=tmp_path / "run", **QUICK)
    assert '"outcome": "failed"' in (tmp_path / "run" / "telemetry.jsonl").read_text()


def test_unknown_settings_are_errors_that_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        vox.train(data="train.jsonl", learning_rate=1e-4, batchsize=4)
    assert caught.value.code == "VOX-C001"
    assert [*caught.value.faults] == [
        "learning_rate is unknown; did you mean lr?",
        "batchsize is unknown; did you mean batch_size?",
    ]
    with pytest.raises(ConfigError) as caught:
        vox.train(data="train.jsonl", rank=-1)
    assert [*caught.value.faults] == ["rank = -1: input should be greater than 0"]
    assert [*tmp_path.iterdir()] == [], "nothing was written"


def test_settings_may_be_of_numpy_and_of_any_collection(
    tiny: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    settings = {"model": tiny("llama"), "data": data, **QUICK, "method": "lora"}
    same = vox.plan(**settings, targets=["q_proj", "v_proj"], seed=7, max_steps=2).settings
    assert same["targets"] == ["q_proj", "v_proj"] and same["seed"] == 7
    numbers = {"rank": np.int64(4), "lr": np.float64(1e-2), "seed": np.array(7)}
    for targets in (
        {"v_proj", "q_proj"}, iter(["q_proj", "v_proj"]), np.array(["q_proj", "v_proj"])
    ):  # fmt: skip
        given = {**settings, **numbers, "max_steps": np.int32(2), "targets": targets}
        assert vox.plan(**given).settings == same
    with vox.load(tiny("llama"), max_tokens=np.int64(2)) as model:
        assert model.generate("Talk?", temperature=np.float32(0)) == model.generate("Talk?")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"targets": []}, "an adapter needs targets: all-linear, or names of modules"),
        ({"resume": True}, "resume = True: input should be 'auto'"),
        ({"data": b"train.jsonl"}, "data.0 = b'train.jsonl': input is not a valid path"),
    ],
)
def test_a_value_of_no_use_is_a_fault_of_the_setting(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vox.train(**{"data": "train.jsonl", **settings})
    assert any(each.startswith(fault) for each in caught.value.faults), caught.value.faults


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("say --field text='my col'", 'say fields={"text": "my col"}'),
        ("--field a.b='x=y' --field q=o\"k", 'fields={"a.b": "x=y", "q": "o\\"k"}'),
        ("pass -O beta=0.1.", 'pass objective_options={"beta": "0.1"}.'),
        ("-O beta=1 -O type=ipo, or", 'objective_options={"beta": "1", "type": "ipo"}, or'),
        ("no -O here", "no `objective_options` here"),
        ("/data--field x=y is no file", "/data--field x=y is no file"),
    ],
)  # fmt: skip
def test_tables_in_errors_are_python(text: str, expected: str) -> None:
    @in_python
    def refuse() -> None:
        raise ConfigError("C002", text, remedy="none")

    with pytest.raises(ConfigError) as caught:
        refuse()
    assert caught.value.what == expected


def test_errors_name_keywords_and_those_of_a_command_flags(
    tiny: Callable[..., Path], data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(**settings: object) -> VoxError:
        with pytest.raises(VoxError) as caught:
            vox.train(**{"model": tiny("llama"), "data": data, "backend": "cpu", **settings})
        return caught.value

    error = refused(targets=["nope"])
    assert (error.where, error.remedy) == (
        "`targets`", "choose modules of this model, or `targets` all-linear"
    )  # fmt: skip
    assert refused(batch_size=0).faults == ("batch_size = 0: input should be greater than 0",)
    assert refused(objective_options={"beta": 1}).where == "`objective_options`"
    assert refused(rollouts=2).found == "`rollouts`, and nothing is sampled"
    assert refused(seq_len=10_000).faults[0].startswith("`seq_len` 10000: the model has positions")
    (fault,) = refused(dataset_text_field="body").faults
    assert fault.endswith('map the column: fields={"text": "NAME"}')
    (fault,) = refused(simpo_gamma=1).faults
    assert fault.endswith('(an option of it: objective_options={"simpo_gamma": "VALUE"})')
    Path("odd.jsonl").write_text('{"q": "a", "a": "b"}')
    fields = 'say so: fields={"prompt": "NAME", "completion": "OTHER"}, or [data.fields]'
    assert fields in refused(data="odd.jsonl").remedy
    assert "vox train --resume RUN" in refused(resume="auto").remedy, "a command stays one"
    absent = data / "run--lr-O/absent.jsonl"
    assert refused(data=absent).where == str(absent), "a path stays one"
    with vox.load(tiny("llama")) as model, pytest.raises(VoxError) as caught:
        model.generate("Hi", top_p=5)
    assert caught.value.faults[0].startswith("top_p = 5")
    assert caught.value.where == "vox.Model.generate"
    assert refused(rnak=1).where == refused(rank=-1).where == "vox.train"
    arguments = ["train", str(data), "--model", str(tiny("llama")), "--targets", "nope"]
    assert failures.run(root, [*arguments, "--backend", "cpu"]) == 2
    assert "or --targets all-linear" in capfd.readouterr().err
    assert failures.run(root, ["train", str(data), "--model", "m", "--rank", "-1"]) == 2
    assert "where:    vox train\n" in capfd.readouterr().err


def test_errors_of_tables_name_the_file(tiny: Callable[..., Path], data: Path) -> None:
    options, origin = "[train.objective-options]\nbta = 1\n", "(objective-options from vox.toml)"
    for objective in ("sft", "dpo"):
        Path("vox.toml").write_text(options)
        with pytest.raises(ConfigError) as caught:
            vox.train(model=tiny("llama"), data=data, objective=objective)
        assert caught.value.where == f"`objective_options` {origin}"
    Path("vox.toml").write_text('[data.fields]\nprompt = "x"\n')
    with pytest.raises(DataError) as unmapped:
        vox.train(model=tiny("llama"), data=data)
    assert unmapped.value.faults[0].endswith("`fields` names (x) (fields from vox.toml)")


def test_settings_without_a_name_are_refused() -> None:
    for function in (vox.train, vox.plan):
        with pytest.raises(ConfigError) as caught:
            function("train.jsonl")
        where = f"vox.{function.__name__}"
        assert caught.value.where == where
        assert caught.value.remedy == f"name it: {where}(model=..., data=...)"


def test_notices_and_errors_of_answers_name_keywords(
    trained: vox.Run, tiny: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    told: list[object] = []
    given = {"data": data / "train.jsonl", "max_steps": 1, "eval_every": 1, "out": "b", **QUICK}
    vox.train(model=tiny("llama"), on_event=told.append, **given)
    notices = [each.message for each in told if isinstance(each, Notice)]
    assert "`eval_every` 1 evaluates nothing: add `valid` or `eval_suite`" in notices
    (tmp_path / "a.jsonl").write_text("{}\n")
    with trained.load(max_tokens=1) as model, pytest.raises(InputError) as caught:
        next(model.answers(["Talk?"], out="a.jsonl"))
    assert caught.value.remedy == "choose another file with `out`"


def test_errors_and_runs_are_pickled(trained: vox.Run) -> None:
    """As results of another process are."""
    with pytest.raises(ConfigError) as caught:
        vox.train(rank=-1, lr=-1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.faults) == (
        ConfigError, str(caught.value), caught.value.faults
    )  # fmt: skip
    stopped = pickle.loads(pickle.dumps(StoppedAtOnce(Path("runs/a"), 3)))
    assert (str(stopped.run), stopped.step) == ("runs/a", 3)
    assert pickle.loads(pickle.dumps(trained)) == trained
    assert pickle.loads(pickle.dumps(vox.train)) is vox.train


def test_an_answer_keeps_its_model_open(trained: vox.Run) -> None:
    with trained.load(dtype="fp32", max_tokens=4) as model:
        pieces = [*model.stream("Talk?")]
    assert [*trained.load(dtype="fp32", max_tokens=4).stream("Talk?")] == pieces


def test_a_chat_says_that_there_is_no_chat_template(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    def told(folder: Path, section: Literal["chat", "generate"] = "chat") -> int:
        events: list[object] = []
        with vox.load(folder, section=section, backend="cpu", on_event=events.append) as model:
            model.chat("Talk?", max_tokens=1)
        notices = [each.message for each in events if isinstance(each, Notice)]
        return sum("has no chat template" in text for text in notices)

    plain = shutil.copytree(tiny("llama"), tmp_path / "plain")
    path = plain / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": None}))
    assert [told(tiny("llama")), told(plain), told(plain, "generate")] == [0, 1, 0]


def test_threads_share_a_model(trained: vox.Run) -> None:
    prompts = ["Talk?", "How do I merge?", "Stop?", "What is 3?"]
    with trained.load(dtype="fp32", max_tokens=12) as model, ThreadPoolExecutor(4) as threads:
        together = [*threads.map(model.generate, prompts * 3)]
        assert together == [*map(model.generate, prompts * 3)]


def test_vox_toml_is_read_and_a_keyword_wins(trained: vox.Run) -> None:
    Path("vox.toml").write_text("[generate]\nmax-tokens = 2\n")
    Path("other.toml").write_text("[generate]\nmax-tokens = 3\n")

    def length(**options: object) -> int:
        with vox.load(trained, **options) as model:
            answer = model.stream("Talk?")
            "".join(answer)
            return answer.completion_tokens

    assert (length(), length(config="other.toml"), length(max_tokens=4)) == (2, 3, 4)


def test_the_plugins_blocked_by_config_are(trained: vox.Run) -> None:
    Path("other.toml").write_text('[plugin]\nblocked = ["cpu"]\n')
    with pytest.raises(BackendError, match=r"blocked by other\.toml"):
        vox.load(trained, backend="cpu", config="other.toml")
    vox.load(trained, backend="cpu").close()


def test_a_plan_to_run_leaves_no_choice_to_a_file() -> None:
    with pytest.raises(ConfigError, match="a pinned plan holds every setting"):
        vox.train(plan="plan.json", config="other.toml")
    with reading("other.toml"), pytest.raises(ConfigError, match="a pinned plan holds every"):
        vox.train(plan="plan.json")  # as `vox train --plan FILE --config FILE` calls it


def test_a_plan_writes_nothing(tiny: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    report = vox.plan(model=tiny("llama"), data=data, max_steps=3, **QUICK)
    assert report.steps.total == 3
    assert sorted(tmp_path.rglob("*")) == before


def test_where_there_are_no_runs() -> None:
    with pytest.raises(AdapterError):
        vox.runs("nowhere")
    Path("runs").mkdir()
    assert vox.runs() == []


# --- names ----------------------------------------------------------------------------------------


def test_no_module_takes_the_place_of_a_function() -> None:
    """Importing `vox_core.NAME` would set the package's attribute of that name."""
    modules = {module.name for module in pkgutil.iter_modules(vox.__path__)}
    assert modules & {*vox.__all__} == set()
    for name in modules - {"cli"}:
        importlib.import_module(f"vox_core.{name}")
    assert {*vox.__all__} <= {*dir(vox)}
    assert all(callable(getattr(vox, name)) for name in vox.__all__)
    with pytest.raises(AttributeError, match="'vox_core' has no attribute 'tarin'"):
        vox.tarin  # noqa: B018


def test_importing_vox_imports_nothing_else() -> None:
    script = "import sys, vox_core; print(*sorted(n for n in sys.modules if 'vox_' in n))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "vox_core\n"
