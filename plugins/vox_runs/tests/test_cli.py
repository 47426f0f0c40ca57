"""`vox runs`: what is printed, of runs of vox's own and of what a stranger left."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.core.plugin_site import MANIFEST, WORKS, Site
from tests.run.history_samples import make_run, start, step, text_of, whole, worked_in

from vox_core.contract import Notice, ObjectiveMetrics, RunEnd, Validation
from vox_runs.cli import sparkline
from vox_runs.watch import shown_until_the_end
from vox_testing.tiny import make_model

STEERING = "\x1b]0;owned\x07\x9b2J\u202e\nmore"


def test_list(vox, tmp_path: Path) -> None:
    assert vox("runs", "list") == (0, "no runs in runs\n", "")
    make_run(tmp_path / "runs" / "b", whole(), began=3000.0)
    make_run(tmp_path / "runs" / "a", [start(), step(1, 2.5)], began=9000.0)
    make_run(tmp_path / "runs" / "c", [])
    done = vox("runs", "list")
    assert (done.code, done.err) == (0, "")
    heads, *rows = (line.split() for line in done.out.splitlines())
    assert heads[:5] == ["run", "status", "steps", "loss", "validation"]
    assert rows[0] == ["runs/c", "died", "0", "of", "?"], "by age; nothing told is oldest"
    assert rows[1][:7] == ["runs/b", "done", "4", "of", "4", "1.0000", "1.5000"]
    assert rows[2][:6] == ["runs/a", "died", "1", "of", "4", "2.5000"]
    told = json.loads(vox("runs", "list", tmp_path / "runs" / "b", "--json").out)
    assert [(each["run"], each["status"], each["loss"]) for each in told] == [
        (str(tmp_path / "runs" / "b"), "done", 1.0)
    ]
    assert "losses" not in told[0]
    done = vox("runs", "list", "nowhere")
    assert (done.code, done.out) == (2, "")
    assert "VOX-A001" in done.err


def test_list_names_what_cannot_be_read_and_goes_on(vox, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "good", whole())
    bad = make_run(tmp_path / "runs" / "bad", [])
    (bad / "telemetry.jsonl").unlink()
    os.mkfifo(bad / "telemetry.jsonl")
    done = vox("runs", "list")
    assert (done.code, done.err) == (0, "")
    assert "unreadable" in done.out and "something that is no file" in done.out
    assert "runs/good  done" in done.out
    assert {each["status"] for each in json.loads(vox("runs", "list", "--json").out)} == {
        "done",
        "unreadable",
    }


def test_show(vox, tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [*whole(), Notice("careful", "warning")])
    (run / "checkpoints" / "step-4").mkdir(parents=True)
    done = vox("runs", "show", "r")
    assert (done.code, done.err) == (0, "")
    lines = dict(line.split("  ", 1) for line in done.out.splitlines() if not line[0].isspace())
    told = {label: text.strip() for label, text in lines.items()}
    assert told["status"] == "done"
    assert told["steps"] == "4 of 4 in 0:07"  # a line after the end is no work
    assert told["loss"] == "4.0000 -> 1.0000 (75 % lower)"
    assert told["validation loss"] == "5.0000 -> 1.5000 (70 % lower)"
    assert told["after steps"] == "0: 5.0000, 4: 1.5000"
    assert (told["tokens/s"], told["checkpoints"], told["warnings"]) == ("200", "step 4", "careful")
    assert "█▆▃▁" in done.out
    assert "next" not in told
    told = json.loads(vox("runs", "show", "r", "--json").out)
    assert told["losses"] == [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]]
    assert told["held_out"] == [[0, 5.0], [4, 1.5]]


STOPPED = (RunEnd(2, "stopped", 2.0),)


@pytest.mark.parametrize(
    ("ended", "record", "checkpoints", "next"),
    [
        ((), "", "none: a resume begins at step 1", ["vox train --resume r"]),
        ((), "run.json", "none: they were removed, so it cannot be resumed", []),
        (STOPPED, "vox_adapter.json", "none: they were removed, so it cannot be resumed", []),
        ((RunEnd(4, "done", 2.0),), "run.json", "none: they were removed", []),
        ((RunEnd(4, "done", 2.0),), "", "none", []),
    ],
)
def test_show_says_what_a_lack_of_checkpoints_means(
    vox, tmp_path: Path, ended, record, checkpoints, next
) -> None:
    run = make_run(tmp_path / "r", [start(), *ended])
    if record:
        (run / record).write_text('{"step": 2}')
    told = dict(line.split(maxsplit=1) for line in vox("runs", "show", "r").out.splitlines())
    assert told["checkpoints"] == checkpoints
    assert [told[label] for label in ("next",) if label in told] == next


def test_show_of_a_run_before_its_first_checkpoint(vox, tmp_path: Path) -> None:
    with worked_in(make_run(tmp_path / "r", [start()])):
        assert "checkpoints  none yet\n" in vox("runs", "show", "r").out


def test_the_validation_of_a_run_with_rewards_is_its_reward(vox, tmp_path: Path) -> None:
    events = [
        Validation(step, -reward, reward) for step, reward in ((0, 0.25), (2, 0.75), (4, 0.5))
    ]
    contract = {"data": {"valid_digest": "v"}, "rollouts": {"rewards": ["exact"]}}
    run = make_run(tmp_path / "r", [start(), *events, RunEnd(4, "done", 2.0)], contract)
    (run / "vox_adapter.json").write_text(json.dumps({"step": 4, "last_step": 4}))
    make_run(tmp_path / "s", [start(), *events[:2]], contract)
    told = [line.split(maxsplit=2) for line in vox("runs", "show", "r").out.splitlines()]
    assert ["validation", "reward", "0.2500 -> 0.5000"] in told
    assert ["best", "reward", "0.7500 after step 2; a later step was written"] in told
    listed = vox("runs", "list", ".").out
    assert "reward 0.5000" in listed and "reward 0.7500" in listed
    told = vox("runs", "compare", "r", "s").out.splitlines()
    assert told[-1] == "neither is better: validation reward 0.7500 and 0.7500, after step 2"


def test_show_has_the_objectives_metrics(vox, tmp_path: Path) -> None:
    events = [ObjectiveMetrics(n, {"reward": n / 4, "kl": 0.5}) for n in (1, 2, 3, 2, 3)]
    make_run(tmp_path / "r", [start(), *events[:3], start(4, 2), *events[3:]])
    told = [line.split(maxsplit=1) for line in vox("runs", "show", "r").out.splitlines()]
    assert ["reward", "0.2500 -> 0.7500"] in told and ["kl", "0.5000"] in told
    (listed,) = json.loads(vox("runs", "list", "--json", "r").out)
    assert "metrics" not in listed
    shown = json.loads(vox("runs", "show", "--json", "r").out)
    assert shown["metrics"]["reward"] == [[1, 0.25], [2, 0.5], [3, 0.75]], "once each"


def test_show_says_which_adapter_it_is_and_that_the_run_stopped_early(vox, tmp_path: Path) -> None:
    events = [start(9), step(1, 4.0), Validation(1, 1.0), step(2, 3.0), Validation(2, 2.0)]
    run = make_run(tmp_path / "r", [*events, RunEnd(2, "done", 2.0)])
    (run / "vox_adapter.json").write_text(json.dumps({"step": 1, "last_step": 2}))
    told = [line.split(maxsplit=1) for line in vox("runs", "show", "r").out.splitlines()]
    assert ["status", "done, stopped early"] in told
    assert ["best", "1.0000 after step 1; which was written"] in told
    assert "1.0000" in vox("runs", "list", "r").out
    (run / "vox_adapter.json").write_text(json.dumps({"step": 2, "last_step": 2}))
    told = [line.split(maxsplit=1) for line in vox("runs", "show", "r").out.splitlines()]
    assert ["best", "1.0000 after step 1; a later step was written"] in told


def test_show_says_how_to_go_on_with_one_that_died(vox, tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start(), step(1, 2.0)])
    assert vox("runs", "show", "r").out.endswith("next         vox train --resume r\n")
    with worked_in(run):
        assert "running" in (out := vox("runs", "show", "r").out)
    assert "--resume" not in out


def test_show_names_objective_and_teacher(vox, tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", whole())
    assert "objective" not in vox("runs", "show", "r").out
    given = {"objective": "distill", "objective_options": {"top_k": "4"}, "teacher": "a/b"}
    (run / "plan.json").write_text(json.dumps({"settings": given}))
    rows = [line.split() for line in vox("runs", "show", "r").out.splitlines()]
    assert ["objective", "distill", "top_k=4"] in rows
    assert ["teacher", "a/b"] in rows


def test_compare(vox, tmp_path: Path) -> None:
    data = {"valid_digest": "v"}
    make_run(tmp_path / "a", whole(), {"optimizer": {"lr": 1e-3}, "data": data})
    make_run(tmp_path / "b", whole(held_out=1.25), {"optimizer": {"lr": 2e-3}, "data": data})
    done = vox("runs", "compare", "a", "b")
    assert done == (
        0,
        "contract      a      b\n"
        "optimizer.lr  0.001  0.002\n"
        "b is better: validation loss 1.5000 and 1.2500, after step 4\n",
        "",
    )
    told = json.loads(vox("runs", "compare", "a", "b", "--json").out)
    assert told["differences"] == [{"field": "optimizer.lr", "a": 0.001, "b": 0.002}]
    assert told["verdict"]["better"] == "b"
    same = vox("runs", "compare", "a", "a").out
    assert same.startswith("the contracts are the same\nneither is better: ")


def test_plot(vox, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    make_run(tmp_path / "a", whole())
    assert vox("runs", "plot", "a", "a", "--out", "f.png") == (0, "f.png: 2 curves\n", "")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    assert vox("runs", "plot", "--out", "f.png").code == 2
    for _ in range(2):  # its own picture is replaced
        assert vox("runs", "plot", "a") == (0, "a-losses.png: 1 curve\n", "")
    assert vox("runs", "plot", "a", "a").out == "losses.png: 2 curves\n"
    (tmp_path / "a-losses.png").write_bytes(b"\x89PNG, mine")
    for flags in ([], ["--out", "a-losses.png"]):
        done = vox("runs", "plot", "a", *flags)
        assert (done.code, "did not write" in done.err) == (2, True)
    assert (tmp_path / "a-losses.png").read_bytes() == b"\x89PNG, mine"


@pytest.mark.foreign_telemetry
def test_what_a_stranger_wrote_steers_no_terminal(vox, tmp_path: Path) -> None:
    """Names, messages, contracts, and the names of folders."""
    events = [
        start(model=STEERING),
        Notice(STEERING, "warning"),
        step(1, 1e308),
        step(2**60, -1e308, memory=2**62),
        RunEnd(7, "failed", float("nan"), f"error[VOX-T004]: no\n  found:    {STEERING}"),
    ]
    name = "r\x1b[31m"
    run = make_run(tmp_path / name, events, {STEERING: STEERING, "n": 10**300})
    with (run / "telemetry.jsonl").open("a") as file:
        file.write('{"event": "step"}\nmine\n' + "x" * 2_000_000 + "\n")
    make_run(tmp_path / "other", whole(), {"n": 1})
    calls = [("list", "."), ("show", name), ("watch", name), ("compare", name, "other")]
    calls += [(*call, "--json") for call in calls if call[0] != "watch"]
    for call in calls:
        done = vox("runs", *call)
        assert done.code == 0, done.err
        printed = (done.out + done.err).replace("\n", "")
        assert printed.isprintable(), call
        assert "\nmore" not in done.out, call
        if call == ("show", name):
            assert "3 lines of telemetry that cannot be read" in done.out
            assert "error[VOX-T004]: no found:" in done.out


def test_list_is_light(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", whole())
    for command in (["list"], ["show", "runs/a"]):
        line = [sys.executable, "-X", "importtime", "-m", "vox_core.cli", "runs", *command]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
        imported = {each.rpartition("|")[2].strip() for each in done.stderr.splitlines()}
        assert "vox_core.run.telemetry" in imported
        assert not imported & {"numpy", "torch", "transformers", "rich", "matplotlib"}


CURVES = {
    "falling": ([4, 3, 2, 1], 80, "█▆▃▁"),
    "flat": ([2, 2, 2], 80, "▁▁▁"),
    "two to a bar": ([8, 6, 2, 0], 2, "█▁"),
    "a gap": ([1, None, 2], 80, "▁ █"),
    "nothing": ([], 80, ""),
    "nothing known": ([None, None], 80, ""),
    "one": ([1], 80, "▁"),
    "no room": ([1, 2], -5, "▁"),
}


@pytest.mark.parametrize("case", CURVES)
def test_a_sparkline(case: str) -> None:
    values, width, expected = CURVES[case]
    assert sparkline(values, width) == expected


def test_a_sparkline_where_there_are_no_bars() -> None:
    assert sparkline([4, 1], 80, "ascii") == "#_"
    assert sparkline([4, 1], 80, None) == "#_"


def vox_in(folder: Path, *arguments: object, **given: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vox_core.cli", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, text=True, **given)  # type: ignore[call-overload,no-any-return]


def add(run: Path, *events: object) -> None:
    with (run / "telemetry.jsonl").open("a") as file:
        file.write(text_of(events))  # type: ignore[arg-type]


def test_watch_follows_a_run_to_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start(), step(1, 4.0)])
    with worked_in(run):
        watching = vox_in(tmp_path, "runs", "watch", "r", stdout=-1, stderr=-1)
        assert watching.stderr is not None
        assert watching.stderr.readline().startswith("training m in fp32")
        assert watching.stderr.readline().startswith("step 1/4")
        add(run, step(2, 3.0))
        assert watching.stderr.readline().startswith("step 2/4  loss 3.0000")
        add(run, step(3, 2.0), step(4, 1.0), RunEnd(4, "done", 2.0))
        out, err = watching.communicate(timeout=120)
    assert watching.returncode == 0
    assert "done after step 4" in err
    assert out.splitlines()[1].split() == ["status", "done"]


def test_watch_shows_the_objectives_metric_of_past_steps(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "r", [start(), ObjectiveMetrics(1, {"reward": 0.25}), step(1, 4.0)])
    shown_until_the_end(run)
    assert "step 1/4  loss 4.0000  reward 0.2500" in capsys.readouterr().err


def test_watch_shows_held_out_losses_of_a_run_that_is_done(tmp_path: Path) -> None:
    many = [event for n in range(1, 41) for event in (step(n, 4.0), Validation(n, 2.0))]
    make_run(tmp_path / "r", [start(40), Validation(0, 5.0), *many, RunEnd(40, "done", 2.0)])
    watching = vox_in(tmp_path, "runs", "watch", "r", stdout=-1, stderr=-1)
    _, err = watching.communicate(timeout=300)
    lines = err.splitlines()
    assert lines[-3].startswith("step 40/40")
    assert lines[-2:] == ["validation loss 2.0000 after step 40", "done after step 40, in 0:02"]
    assert sum(line.startswith("validation loss") for line in lines) == 20, "the newest"


def test_watch_is_ended_by_ctrl_c_and_the_run_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start(), step(1, 4.0)])
    with worked_in(run):
        watching = vox_in(tmp_path, "runs", "watch", "r", stdout=-1, stderr=-1)
        assert watching.stderr is not None
        watching.stderr.readline()
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=120)
    assert (watching.returncode, out) == (130, "")
    assert err.endswith("stopped watching; the run continues\n")


def test_watch_on_a_terminal_that_is_resized(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [start(50), step(1, 4.0)])
    leader, follower = pty.openpty()
    with worked_in(run):
        environ = {**os.environ, "TERM": "xterm"}
        watching = vox_in(tmp_path, "runs", "watch", "r", stdout=-1, stderr=follower, env=environ)
        os.close(follower)
        seen = os.read(leader, 1 << 16)  # it is up, and draws
        for number, width in enumerate((40, 200, 1, 80), start=2):
            set_width(leader, width)
            watching.send_signal(signal.SIGWINCH)
            add(run, step(number, 4.0 - number / 10))
            seen += os.read(leader, 1 << 16)  # which waits until it has drawn again
        add(run, RunEnd(5, "stopped", 2.0))
        assert watching.wait(120) == 0
    seen += os.read(leader, 1 << 16)
    os.close(leader)
    assert b"Traceback" not in seen
    assert b"stopped after step 5" in seen


def set_width(terminal: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


LOUD = (
    WORKS.replace(
        "    def add_learner(self, name, state):\n        pass\n",
        "    def add_learner(self, name, state):\n        self.start = state\n",
    )
    .replace(
        "    def accumulate(self, batch, seed, learner, weigh=None):\n        return batch\n",
        """
    def accumulate(self, batch, seed, learner, weigh=None):
        import os
        for stream in (1, 2):
            try:
                os.write(stream, b"loud\\n")
            except OSError:
                pass
        return -batch.scored_T.astype("float32")
""",
    )
    .replace(
        '        return TrainState(7, AdapterState("lora", {}))\n', "        return self.start\n"
    )
    .replace(
        "seed=None):\n        return batch\n",
        'seed=None):\n        return -batch.scored_T.astype("float32")\n',
    )
)
"""A backend that trains nothing, without torch, and writes to its streams as libraries do."""


@pytest.fixture
def training(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A short run with a checkpoint on the way."""
    site.add("loud", LOUD, manifest=MANIFEST.replace("1000000", "0"))
    path = filter(None, (str(site.folder), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "tensorboard,wandb")
    base = make_model("llama", tmp_path / "base")
    (tmp_path / "train.jsonl").write_text('{"prompt": "Which?", "completion": "That one."}\n')
    given: dict[str, object] = {
        "model": base,
        "data": "train.jsonl",
        "out": "run",
        "backend": "loud",
        "dtype": "fp32",
        "max-steps": 6,
        "save-every": 2,
    }
    return ["train", *(each for key, value in given.items() for each in (f"--{key}", value))]


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param("stdout", marks=pytest.mark.long),
        pytest.param("stderr", marks=pytest.mark.long),
        "both",
    ],
)
def test_a_run_outlives_whoever_reads_its_output(
    stream: str, training: list[object], tmp_path: Path, vox
) -> None:
    """`vox train 2>&1 | head -1`: the reader takes a line at most and is gone."""
    reader, writer = os.pipe()
    kept = tmp_path / "kept.txt"
    with kept.open("w") as other:
        streams = {
            "stdout": other if stream == "stderr" else writer,
            "stderr": other if stream == "stdout" else writer,
        }
        run = vox_in(tmp_path, *training, **streams)
        os.close(writer)
        if stream != "stdout":
            assert os.read(reader, 1)
        os.close(reader)
        code = run.wait(120)
    assert code == (0 if stream == "stderr" else 1), "the summary had nobody to go to"
    assert "Traceback" not in kept.read_text()
    told = json.loads(vox("runs", "show", "run", "--json").out)
    assert (told["status"], told["step"]) == ("done", 6)
    assert 6 in told["checkpoints"]
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_a_run_whose_streams_are_closed(training: list[object], tmp_path: Path, vox) -> None:
    """No file of the run takes the place of a stream, and with it what is printed."""
    line = " ".join(f"'{each}'" for each in [sys.executable, "-m", "vox_core.cli", *training])
    done = subprocess.run(["sh", "-c", f"{line} <&- >&- 2>&-"], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert json.loads(vox("runs", "show", "run", "--json").out)["status"] == "done"
    for line in io.StringIO((tmp_path / "run" / "telemetry.jsonl").read_text()):
        json.loads(line)
