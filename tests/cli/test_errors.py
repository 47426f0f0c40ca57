"""The boundary: exit codes, stderr and stdout, suggestions, JSON, tracebacks."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest

from vox_core import errors as tree
from vox_core.cli import failures
from vox_core.cli.lazy import Command

COMMAND = [sys.executable, "-m", "vox_core.cli"]


def outcome(
    error: BaseException, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that does nothing but fail."""

    def fail() -> None:
        raise error

    json_flag = click.Option(["--json"], is_flag=True, expose_value=False)
    command = Command("fail", callback=fail, params=[json_flag])
    return (failures.run(command, arguments), *capsys.readouterr())


@pytest.mark.parametrize(
    ("kind", "code"), [(tree.DataError, 2), (tree.BackendError, 2), (tree.StorageError, 1)]
)
def test_a_vox_error_tells_itself_on_stderr(kind, code: int, capsys) -> None:
    error = kind("D001", "what", where="here", remedy="do this")
    assert outcome(error, capsys) == (code, "", f"{error}\n")


def test_json_gives_the_error_on_stdout_as_well(capsys) -> None:
    error = tree.DataError("D003", "rows", where="f", remedy="mend", faults=["line 1", "line 2"])
    code, out, err = outcome(error, capsys, "--json")
    assert (code, err) == (2, f"{error}\n")
    assert json.loads(out)["error"] == {
        "code": "VOX-D003",
        "what": "rows",
        "where": "f",
        "found": None,
        "expected": None,
        "remedy": "mend",
        "faults": ["line 1", "line 2"],
    }


def test_a_bug_is_said_in_a_few_lines(capsys) -> None:
    code, out, err = outcome(KeyError("x"), capsys)
    assert (code, out) == (1, "")
    assert err.startswith(
        "error[VOX-X002]: this is a bug in vox\n  found:    KeyError: 'x'\nnext: "
    )
    assert "Traceback" not in err


def test_output_to_a_full_disk_is_no_bug_of_vox(capsys) -> None:
    code, _, err = outcome(OSError(errno.ENOSPC, "No space left on device"), capsys)
    assert code == 1
    assert err == "error[VOX-S001]: the disk is full\n  where:    stdout\nnext: free space there\n"


def test_a_folder_of_somebody_else_is_no_bug_of_vox(capsys) -> None:
    """Such as a run that `vox merge` looks into."""
    code, _, err = outcome(PermissionError(errno.EACCES, "Permission denied", "run/a.json"), capsys)
    assert code == 1
    assert err.startswith(
        "error[VOX-S002]: a file could not be read or written\n  where:    run/a.json\n"
        "  found:    Permission denied\n"
    )


def test_a_library_that_is_not_installed_is_no_bug_of_vox(capsys) -> None:
    code, _, err = outcome(ModuleNotFoundError("No module named 'griffe'", name="griffe"), capsys)
    assert code == 1
    assert err.startswith(
        "error[VOX-X001]: the Python module 'griffe' is missing\nnext: vox plugin"
    )
    _, _, err = outcome(
        ModuleNotFoundError("No module named 'vox_core.x'", name="vox_core.x"), capsys
    )
    assert "X002" in err


def test_a_bug_has_its_json_too(capsys) -> None:
    code, out, _ = outcome(ZeroDivisionError("x"), capsys, "--json")
    assert code == 1
    described = json.loads(out)["error"]
    assert [*described] == [*failures.KEYS, "faults"]
    assert (described["code"], described["found"]) == ("VOX-X002", "ZeroDivisionError: x")


@pytest.mark.parametrize("error", [KeyError("x"), tree.DataError("D001", "w", remedy="r")])
def test_debug_adds_the_traceback(error: Exception, capsys) -> None:
    _, out, err = outcome(error, capsys, "--debug")
    assert out == ""
    assert "Traceback (most recent call last)" in err
    assert "in fail" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_ctrl_c_exits_130(error: BaseException, capsys) -> None:
    code, out, err = outcome(error, capsys)
    assert (code, out) == (130, "")
    assert err.strip() == "stopped"


@pytest.mark.parametrize(
    ("line", "what", "remedy"),
    [
        ("trian", "error[VOX-C006]: unknown command trian", "did you mean train?"),
        ("install mlx", "error[VOX-C006]: unknown command install", "did you mean plugin install"),
        ("stats", "error[VOX-C006]: unknown command stats", "did you mean data stats?"),
        ("data install", "error[VOX-C006]: unknown command install", "next: see `vox data --help`"),
        ("grpo x", "error[VOX-C006]: unknown command grpo", "did you mean train --objective grpo?"),
        (
            "train --shard false",
            "error[VOX-C006]: --shard takes no value; its opposite is --no-shard",
            "vox train --help",
        ),
        ("chat --model x", "error[VOX-C006]: unknown option --model", "it is the first argument"),
        ("merge_lora", "error[VOX-C006]: unknown command merge_lora", "did you mean merge?"),
        ("model lst", "error[VOX-C006]: unknown command lst", "did you mean list?"),
        ("train --rnak 3", "error[VOX-C006]: unknown option --rnak", "did you mean --rank?"),
        ("train --rank", "error[VOX-C006]: option '--rank' requires an", "vox train --help"),
        ("train --dtype bf61", "error[VOX-C002]: the settings are not valid", "vox train --help"),
        ("instal", "error[VOX-C006]: unknown command instal", "did you mean plugin install?"),
        ("plguin", "error[VOX-C006]: unknown command plguin", "did you mean plugin?"),
        ("watch", "error[VOX-C006]: unknown command watch", "did you mean runs watch?"),
        ("chat m hello", "error[VOX-C006]: got unexpected extra argument", "vox generate RUN"),
        ("merge", "error[VOX-C006]: missing argument 'RUN'", "vox merge --help"),
        ("generate m", "error[VOX-C006]: missing argument 'PROMPT'", "vox generate --help"),
        ("zzz", "error[VOX-C006]: unknown command zzz", "next: see `vox --help`"),
    ],
)
def test_wrong_usage_is_told_in_the_same_style(vox, line: str, what: str, remedy: str) -> None:
    done = vox(*line.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(what)
    assert remedy in done.err


def test_wrong_usage_as_json(vox) -> None:
    done = vox("train", "--rnak", 3, "--json")
    assert json.loads(done.out)["error"]["what"] == "unknown option --rnak"


def test_all_bad_values_are_told_together(vox) -> None:
    done = vox("train", "--rank", "x", "--lr", "-1", "--epochs", 0)
    assert done.code == 2
    assert [key for key in ("rank", "lr", "epochs") if f"- {key} = " in done.err] == [
        "rank",
        "lr",
        "epochs",
    ]


# --- real processes -------------------------------------------------------------------------------


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [*COMMAND, *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)


def test_bad_data_exits_2_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    done = process("train", "--data", "bad.jsonl", "--out", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("reading the model and the data …\nerror[VOX-D003]")
    assert "Traceback" not in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]


def test_unknown_key_in_vox_toml_exits_2(tmp_path: Path) -> None:
    (tmp_path / "vox.toml").write_text("[train]\nrnak = 3\n")
    done = process("train", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["faults"] == [
        "[train] rnak is unknown; did you mean rank?"
    ]


def into_a_closed_pipe(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Exit code and stderr of a command whose stdout nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    line = [*COMMAND, *arguments]
    done = subprocess.run(
        line, cwd=cwd, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    return done.returncode, done.stderr


def test_a_reader_that_leaves_is_worth_no_word(tmp_path: Path) -> None:
    assert into_a_closed_pipe("config", "schema", cwd=tmp_path) == (1, "")


@pytest.mark.parametrize(
    ("before", "first"),
    [
        pytest.param("SIG_IGN", "Handlers.SIG_IGN", id="nohup"),
        pytest.param("SIG_DFL", "<built-in function default_int_handler>", id="terminal"),
    ],
)
def test_a_closed_terminal_interrupts_unless_it_is_to_be_ignored(before: str, first: str) -> None:
    code = (
        "import signal as s; from vox_core.cli import prepare; from vox_core.host import process\n"
        f"s.signal(s.SIGHUP, s.{before}); prepare(); print(repr(s.getsignal(s.SIGHUP)))\n"
        "with process.handled(print, *process.ENDING): print(s.getsignal(s.SIGHUP) is print)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert first in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[1] == str(before == "SIG_DFL")


WAITING = """
import sys, time, click
from vox_core.cli import failures, prepare
@click.command()
def wait():
    click.echo("waiting", err=True)
    while True:  # Python does not see a signal that comes just before a long sleep begins
        time.sleep(0.05)
prepare()
sys.exit(failures.run(wait, []))
"""


def test_a_command_whose_terminal_is_closed_exits_130() -> None:
    """It has no terminal any more to say so."""
    ours, theirs = pty.openpty()
    take = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    with subprocess.Popen(
        [sys.executable, "-c", take + WAITING],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        assert b"waiting" in os.read(ours, 100)
        os.close(ours)
        assert process.wait(60) == 130


def test_an_error_without_a_reader_keeps_its_exit_code(tmp_path: Path) -> None:
    code, err = into_a_closed_pipe("trian", "--json", cwd=tmp_path)
    assert code == 2
    assert err.endswith("see `vox --help`\n")


def test_a_hint_imports_no_plugin(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = list[object]()
    monkeypatch.setattr("vox_core.cli.lazy._of_plugin", imported.append)
    done = vox("stats")
    assert (done.code, "did you mean data stats?" in done.err, imported) == (2, True, [])


def test_an_option_is_no_value_of_the_one_before_it(vox) -> None:
    done = vox("train", "--model", "--method", "full", "data.jsonl")
    assert done.code == 2
    assert "error[VOX-C006]: --model needs a value; found the option --method\n" in done.err
    assert "found the option --lr=1" in vox("train", "--data", "--lr=1").err
    assert "found the option -O" in vox("train", "--out", "-O", "beta=1").err
    after = vox("train", "--", "--model", "--method").err
    assert "needs a value" not in after, "files may have any name after --"
    options = [click.Option(["--colour/--plain"]), click.Option(["--file"])]
    with pytest.raises(click.BadOptionUsage, match="--file needs a value; found the option --pl"):
        Command("draw", params=options).make_context("draw", ["--file", "--plain"])


def test_a_value_may_begin_with_a_dash(vox) -> None:
    Path("x.jsonl").write_text('{"text": "a"}')
    assert "where:    --method\n" in vox("train", "--model=--method", "x.jsonl").err
    assert "lr = '-1'" in vox("train", "--model", "m", "--lr", "-1", "x.jsonl").err
