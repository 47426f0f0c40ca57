"""`vox plugin check` on projects that were never installed, each in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vox_core.cli import failures, root
from vox_core.errors import BackendError, ConfigError, PluginError
from vox_testing import check as testing_check
from vox_testing import suite
from vox_testing.check import CORE, Outcome, check

PYPROJECT = """
[project]
name = "vox-x-{id}"
version = "0.1.0"
[project.entry-points."vox_core.plugins"]
{id} = "vox_x_{id}:backend"
"""
MANIFEST = """
id = "{id}"
name = "{id}"
version = "0.1.0"
api = "2.0"
licence = "MIT"
"""
NOT_YET = "[requires]\n"
DECLARED = """
[capabilities]
devices = ["cpu"]
quantisations = ["none"]
dtypes = ["fp32"]
methods = ["lora"]
families = ["llama"]
"""
PROBE = 'print(\'{"present": true, "devices": [{"name": "c", "tag": "cpu"}], "detail": "a CPU"}\')'
HOOKS = """
from vox_core.hookspecs import hookimpl

class Backend:
    @hookimpl
    def vox_train(self, job, context):
        raise NotImplementedError("to be written")
    @hookimpl
    def vox_merge(self, job, context):
        raise NotImplementedError("to be written")
    @hookimpl
    def vox_load(self, job, context):
        raise NotImplementedError("to be written")

backend = Backend()
"""


def project(folder: Path, id: str, code: str = HOOKS, declared: str = NOT_YET) -> Path:
    package = folder / "src" / f"vox_x_{id}"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(id=id))
    (package / "__init__.py").write_text(code)
    (package / "probe.py").write_text(PROBE)
    probe = '[probe]\nfile = "probe.py"\n'
    (package / "vox_plugin.toml").write_text(MANIFEST.format(id=id) + declared + probe)
    return folder


def named(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {outcome.check: outcome for outcome in outcomes}


def test_what_is_not_declared_is_skipped_and_says_so(tmp_path: Path) -> None:
    id, outcomes = check(str(project(tmp_path, "bare")))
    told = named(outcomes)
    assert id == "bare"
    assert {outcome.status for outcome in outcomes} == {"passed", "skipped"}
    assert told["every hook is there"].status == "passed"
    assert told["the loss falls"].detail.startswith("not declared: any methods")


SOME = """
from vox_testing.suite import (
    test_accumulate_returns_the_log_probs,
    test_logits_are_the_references,
    test_merged_weights_are_the_formula,
    test_the_loss_falls,
)
"""


@pytest.mark.parametrize(
    "checks",
    [SOME, pytest.param(testing_check._SUITE, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_what_is_declared_and_broken_fails(
    checks: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing_check, "_SUITE", checks)
    folder = project(tmp_path, "broken", declared=DECLARED)
    code = failures.run(root, ["plugin", "check", str(folder), "--json"])
    out, progress = capfd.readouterr()
    told = json.loads(out)
    found = {each["check"]: each for each in told["checks"]}
    assert (code, told["id"], told["ok"]) == (1, "broken", False)
    assert found["the loss falls"]["status"] == "failed"
    assert "backend 'broken' failed in vox_train" in found["the loss falls"]["detail"]
    assert found["accumulate returns the log probs [dora]"] == {
        "check": "accumulate returns the log probs [dora]",
        "status": "skipped",
        "detail": "not declared: method dora",
    }
    assert "failed" in progress


def test_the_table_and_the_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noisy = "print('hello')\n" + HOOKS
    code = failures.run(root, ["plugin", "check", str(project(tmp_path, "noisy", noisy))])
    *table, failed, summary = capfd.readouterr().out.splitlines()
    assert code == 1
    assert {line.split()[0] for line in table} == {"skipped"}
    assert len(table) < 20
    (one,) = [line for line in table if "optimizer adamw-8bit" in line]
    assert one.split(maxsplit=2) == [
        "skipped",
        "1",
        "not declared: optimizer adamw-8bit (moments in 8 bits are near and rounded)",
    ]
    (many,) = [line for line in table if "any methods," in line]
    assert many.endswith("not declared: any methods, dtypes, quantisations, families")
    assert failed.startswith("failed  importing the package does nothing  ")
    assert failed.endswith("importing vox_x_noisy wrote to stdout: assert b'hello\\n' == b''")
    assert summary.startswith("noisy: 3 passed")


def test_a_package_that_cannot_be_imported_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = HOOKS + "raise ImportError('libfoo is missing')\n"
    code = failures.run(
        root, ["plugin", "check", str(project(tmp_path, "bad", bad)), "-k", "import"]
    )
    assert code == 1
    assert "does nothing  ImportError: libfoo is missing: assert 1 == 0" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "AssertionError: a.weight\nassert 0.02 < 1e-06\n +  where",
            "a.weight: assert 0.02 < 1e-06",
        ),
        ("AssertionError: assert 0.3 < 0.1\n +  where", "assert 0.3 < 0.1"),
        ("AssertionError\nassert 1 == 2", "assert 1 == 2"),
        ("assert (5, 0) == (3, 0)\n\n  At index 0", "assert (5, 0) == (3, 0)"),
        ("", ""),
    ],
)
def test_a_failure_has_its_comparison(message: str, reason: str) -> None:
    assert testing_check._reason(message) == reason


def test_checks_are_chosen_as_pytest_chooses_tests(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(project(tmp_path, "chosen", "print('hello')\n" + HOOKS))
    outcomes = check(folder, only="manifest or hook")[1]
    assert {each.check for each in outcomes} == {"the manifest is valid", "every hook is there"}
    assert failures.run(root, ["plugin", "check", folder, "-k", "hook"]) == 0
    assert failures.run(root, ["plugin", "check", folder, "-x", "-k", "importing or hook"]) == 1
    assert "0 passed, 0 skipped, 1 failed" in capfd.readouterr().out


@pytest.mark.parametrize("expression", ["no-such-check", "merge and"])
def test_an_expression_that_chooses_nothing_is_refused(tmp_path: Path, expression: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(str(project(tmp_path, "unchosen")), only=expression)
    assert (caught.value.code, caught.value.found) == ("VOX-C002", expression)


def test_a_plugin_of_which_nothing_was_checked_has_not_passed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = failures.run(root, ["plugin", "check", str(project(tmp_path, "idle")), "--json"])
    out, progress = capfd.readouterr()
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert (
        "idle: not passed: neither training, merging nor loading was checked "
        "(not declared: any dtypes, families; not declared: any methods"
    ) in progress


def test_what_stands_for_an_operation_is_a_check_of_the_suite() -> None:
    assert {f"test_{name.replace(' ', '_')}" for name in CORE} <= set(suite.__all__)


def test_a_plugin_that_has_the_user_stop_pytest_is_told(tmp_path: Path) -> None:
    """pytest leaves a report then too, of the checks that it had come to."""
    code = HOOKS.replace('raise NotImplementedError("to be written")', "raise KeyboardInterrupt")
    with pytest.raises(PluginError) as caught:
        check(str(project(tmp_path, "stopping", code, DECLARED)))
    assert caught.value.found == (
        "the process ended with exit 2, which is how pytest says that it was interrupted"
    )


def test_a_suite_that_cannot_be_collected_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a report has a case without a name."""
    monkeypatch.setattr(testing_check, "_SUITE", "import vox_x_nothing")
    with pytest.raises(PluginError) as caught:
        check(str(project(tmp_path, "unheard")))
    assert caught.value.found == (
        "the process ended with exit 2: E   ModuleNotFoundError: No module named 'vox_x_nothing'"
    )


def test_a_plugin_that_ends_the_process_is_told(tmp_path: Path) -> None:
    code = HOOKS.replace('raise NotImplementedError("to be written")', "import os; os.abort()")
    with pytest.raises(PluginError) as caught:
        check(str(project(tmp_path, "ending", code, DECLARED)))
    assert caught.value.found == "the process ended by SIGABRT"


HANGING = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
file = pathlib.Path(__file__).with_name("pids")
file.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
file.with_suffix(".new").rename(file)
time.sleep(120)
"""


def gone(pid: int) -> bool:
    """Ended; an orphan that nobody has reaped yet is."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        os.kill(pid, 0)
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return not stat.exists()


def eventually(condition: Callable[[], bool], within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


def all_gone(file: Path) -> bool:
    """Both processes of `HANGING`."""
    return eventually(lambda: all(gone(int(pid)) for pid in file.read_text().split()))


def test_an_import_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing_check, "IMPORT_LIMIT_S", 3.0)
    with pytest.raises(PluginError, match="importing vox_x_stuck does not end") as caught:
        check(str(project(tmp_path, "stuck", HANGING)))
    assert caught.value.found == "it was ended after 3 s, with whatever it had started"
    assert all_gone(tmp_path / "src/vox_x_stuck/pids")


def test_a_suite_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing_check, "_SUITE", SOME)  # it comes to the hook sooner
    hangs = "\n".join(f"        {line}" for line in HANGING.strip().splitlines())
    code = HOOKS.replace('        raise NotImplementedError("to be written")', hangs)
    folder = project(tmp_path, "slow", code, DECLARED)
    with pytest.raises(PluginError, match="the suite on plugin 'slow' does not end") as caught:
        check(str(folder), limit_s=8.0)
    assert caught.value.found == "it was ended after 8 s, with whatever it had started"
    assert all_gone(folder / "src/vox_x_slow/pids")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_command_is_ended(how: signal.Signals, tmp_path: Path) -> None:
    folder = project(tmp_path, "left", HANGING)
    command = [sys.executable, "-m", "vox_core.cli", "plugin", "check", str(folder)]
    pids = folder / "src/vox_x_left/pids"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as vox:
        assert eventually(pids.exists)
        vox.send_signal(how)
    assert all_gone(pids)


def test_what_a_plugin_leaves_running_is_ended_after_the_suite(tmp_path: Path) -> None:
    """By the time that the result is there."""
    quiet = 'time.sleep(120)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL'
    leaving = HANGING.replace('time.sleep(120)"]', quiet).replace("time.sleep(120)\n", "")
    folder = project(tmp_path, "untidy", leaving + HOOKS)
    check(str(folder))
    assert all_gone(folder / "src/vox_x_untidy/pids")


def test_an_unknown_id_and_a_folder_without_a_plugin_are_told(tmp_path: Path) -> None:
    with pytest.raises(BackendError) as caught:
        check("no-such-plugin")
    assert caught.value.code == "VOX-B003"
    for content, found in (
        ('[project]\nname = "other"\n', "entry points: none"),
        ("project = 1\n", "AttributeError: "),
        ('[project]\nname = "other"\nentry-points = 1\n', "AttributeError: "),
    ):
        (tmp_path / "pyproject.toml").write_text(content)
        with pytest.raises(BackendError) as caught:
            check(str(tmp_path))
        assert caught.value.code == "VOX-B011"
        assert str(caught.value.found).startswith(found)
