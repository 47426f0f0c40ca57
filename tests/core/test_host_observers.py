"""Observers: told of everything, each by itself, and no danger to a run."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core.plugin_site import MANIFEST, Site
from vox_core.config import TrainSettings, validate
from vox_core.contract import Event, Notice, RunEnd, StepDone
from vox_core.host.observers import Observers
from vox_core.run.train import train
from vox_core.testing.tiny import make_model

OBSERVER = MANIFEST.partition("[capabilities]")[0].replace("MlBackend", "Observer")
NOTES = """
from vox_core.hookspecs import hookimpl
class Watcher:
    heard = []
    @hookimpl
    def vox_event(self, event):
        print("loud")
        self.heard.append(event.name)
        {then}
backend = Watcher()
"""
EVENT = Notice("hello")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    yield Site(folder)
    for name in [name for name in sys.modules if name.startswith("vox_x_")]:
        del sys.modules[name]


def watch(site: Site, id: str, then: str = "pass", body: str = NOTES) -> Callable[[], list[str]]:
    """Install an observer; gives what it has heard, once loaded."""
    package = site.add(id, body.format(then=then) if body == NOTES else body, manifest=OBSERVER)
    return lambda: sys.modules[package].backend.heard  # type: ignore[no-any-return]


def test_each_is_told_of_every_event_and_kept_off_stdout(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = [watch(site, id) for id in ("one", "two")]
    observers = Observers()
    assert observers.tell(EVENT) == observers.tell(RunEnd(1, "done", 1.0)) == []
    assert [each() for each in heard] == [["notice", "run_end"]] * 2
    assert capsys.readouterr().out == ""


RAISED = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "raise SystemExit(0)": "SystemExit: 0",
    "raise KeyboardInterrupt": "KeyboardInterrupt:",
    "raise GeneratorExit": "GeneratorExit:",
}


@pytest.mark.parametrize("then", RAISED)
def test_one_that_raises_is_told_of_once_and_dropped(then: str, site: Site) -> None:
    bad, good = watch(site, "bad", then), watch(site, "good")
    observers = Observers()
    (fault,) = observers.tell(EVENT)
    assert fault.startswith(f"observer 'bad' failed and was dropped: {RAISED[then]}")
    assert observers.tell(EVENT) == []
    assert (bad(), good()) == (["notice"], ["notice", "notice"])


def test_it_is_isolated_in_any_thread(site: Site) -> None:
    watch(site, "bad", "raise KeyboardInterrupt")
    told: list[list[str]] = []
    observers = Observers()
    thread = threading.Thread(target=lambda: told.append(observers.tell(EVENT)))
    thread.start()
    thread.join()
    assert len(told[0]) == 1


def test_the_users_own_interrupt_passes(site: Site) -> None:
    watch(site, "slow", "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Observers().tell(EVENT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


LEFT_OUT = {
    "import vox_x_nothing": "No module named 'vox_x_nothing'",
    "raise SystemExit(3)": "SystemExit: 3",
    NOTES.replace("@hookimpl", ""): "no vox_event",
    NOTES.replace("vox_event", "vox_evnet"): "unknown hook 'vox_evnet'",
    NOTES.replace("self, event", "self, happening"): "hook 'vox_event'",
}


@pytest.mark.parametrize("body", LEFT_OUT)
def test_one_that_cannot_be_loaded_is_left_out_and_told_of(body: str, site: Site) -> None:
    watch(site, "bad", body=body.replace("{then}", "pass"))
    good = watch(site, "good")
    observers = Observers()
    (fault,) = observers.tell(EVENT)
    assert fault.startswith("observer 'bad' is left out: ")
    assert LEFT_OUT[body] in fault
    assert good() == ["notice"]


def test_one_with_a_newer_api_is_left_out_unimported(site: Site) -> None:
    package = site.add("newer", NOTES.format(then="pass"), manifest=OBSERVER, api="7.0")
    (fault,) = Observers().tell(EVENT)
    assert "written for 7.0" in fault
    assert package not in sys.modules


def test_a_blocked_one_is_left_out_in_silence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(site, "good")
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "good")
    assert Observers().tell(EVENT) == []
    assert "vox_x_good" not in sys.modules


def test_a_run_goes_on_without_an_observer_that_raises(site: Site, tmp_path: Path) -> None:
    heard = watch(site, "good")
    watch(site, "bad", "assert event.name != 'step'")
    (tmp_path / "train.jsonl").write_text('{"prompt": "Which?", "completion": "That one."}\n')
    settings = {
        "model": str(make_model("llama", tmp_path / "model")),
        "data": [tmp_path / "train.jsonl"],
        "out": tmp_path / "run",
        "backend": "cpu",
        "max_steps": 3,
    }
    events: list[Event] = []
    report = train(validate(TrainSettings, settings), observe=events.append)
    assert report.steps == 3
    warnings = [e.message for e in events if isinstance(e, Notice) and e.level == "warning"]
    assert [text.split(":")[0] for text in warnings] == ["observer 'bad' failed and was dropped"]
    assert heard().count("step") == len([e for e in events if isinstance(e, StepDone)]) == 3
    assert "warning" in json.dumps((tmp_path / "run/telemetry.jsonl").read_text())
