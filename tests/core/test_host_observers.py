"""Observers: told of everything, each in a process of its own, and no danger to a run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.core.plugin_site import MANIFEST, Site
from vox_core.config import TrainSettings, validate
from vox_core.contract import Event, Notice, RunEnd, StepDone
from vox_core.host import observers as host_observers
from vox_core.host.observers import Observers
from vox_core.run.train import train
from vox_testing.tiny import make_model

OBSERVER = MANIFEST.partition("[capabilities]")[0] + 'provides.hooks = ["vox_event"]\n'
NOTES = """
import os, pathlib, signal, time
from vox_core.contract import *
from vox_core.hookspecs import hookimpl
HEARD = pathlib.Path({heard!r})
def note(words):
    with HEARD.open("a") as file:
        file.write(str(words) + "\\n")
{at_import}
class Watcher:
    @hookimpl
    def vox_event(self, event):
        print("loud")
        note(event)
        {then}
backend = Watcher()
"""
EVENT, END = Notice("hello"), RunEnd(1, "done", 1.0)
HANG = "time.sleep(600)"
KILLED = "os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("VOX_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "tensorboard,wandb")
    monkeypatch.chdir(tmp_path)
    return Site(folder)


def watch(
    site: Site, id: str, then: str = "pass", at_import: str = "", body: str = NOTES
) -> Callable[[], list[str]]:
    """Install an observer; gives the events that it has heard, as they are written."""
    heard = site.folder / f"{id}.txt"
    told = {"{heard!r}": repr(str(heard)), "{at_import}": at_import, "{then}": then}
    for place, text in told.items():
        body = body.replace(place, text)
    site.add(id, body, manifest=OBSERVER)
    return lambda: heard.read_text().splitlines() if heard.exists() else []


def faults_of(observers: Observers, *events: Event) -> list[str]:
    """What comes of telling these and then the end."""
    return [fault for event in (*events, END) for fault in observers.tell(event)]


def test_each_is_told_of_every_event_in_order_and_kept_off_stdout(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same objects as the run's, float by float, and whatever comes while one is imported."""
    heard = [watch(site, "one"), watch(site, "two", at_import="time.sleep(0.5)")]
    events = [StepDone(n, 1 / 3, 1e-4, float("inf"), 7, 3, 0.1) for n in range(50)]
    assert faults_of(Observers(), EVENT, *events) == []
    assert [each() for each in heard] == [[repr(event) for event in (EVENT, *events, END)]] * 2
    out, err = capfd.readouterr()
    assert (out, "loud" in err) == ("", True)


def test_a_broken_plugin_is_named_unless_it_is_disabled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what it would have done, and it may be a tracker."""
    site.add("bad", NOTES, manifest="[provides]\nhooks = ['vox_event']\n")
    assert faults_of(Observers()) == ["plugin 'bad' is broken: vox plugin doctor bad"]
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "tensorboard,wandb,bad")
    assert faults_of(Observers()) == []


def test_no_observer_is_imported_in_the_process_of_the_run(site: Site) -> None:
    heard = watch(site, "good", then="note(os.getpid())")
    assert faults_of(Observers()) == []
    assert "vox_x_good" not in sys.modules
    assert heard()[1] != str(os.getpid())


def test_telling_does_not_wait(site: Site) -> None:
    """Neither for the import nor for what was told before."""
    go = site.folder / "go"
    wait = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    heard = watch(site, "slow", wait, at_import=wait)
    observers = Observers()
    assert observers.tell(EVENT) == []
    assert heard() == []
    go.touch()
    assert observers.tell(END) == []
    assert len(heard()) == 2


FAILED = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "raise SystemExit(0)": "SystemExit: 0",
    "raise KeyboardInterrupt": "KeyboardInterrupt:",
    "raise GeneratorExit": "GeneratorExit:",
    "os.kill(os.getpid(), signal.SIGINT)": "KeyboardInterrupt:",
    "os._exit(0)": "its process ended with exit 0",
    "os._exit(3)": "its process ended with exit 3",
    KILLED: "its process was ended by SIGSEGV",
}


@pytest.mark.parametrize("then", FAILED)
def test_one_that_fails_is_told_of_once_and_dropped(then: str, site: Site) -> None:
    bad, good = watch(site, "bad", then), watch(site, "good")
    (fault,) = faults_of(Observers(), EVENT)
    assert fault.startswith(f"tracker 'bad' failed and was dropped: {FAILED[then]}")
    assert (len(bad()), len(good())) == (1, 2)


LEFT_OUT = {
    "import vox_x_nothing": "No module named 'vox_x_nothing'",
    "raise SystemExit(3)": "SystemExit: 3",
    "raise KeyboardInterrupt": "KeyboardInterrupt:",
    "import os; os._exit(0)": "its process ended with exit 0",
    f"import os, signal; {KILLED}": "its process was ended by SIGSEGV",
    NOTES.replace("@hookimpl", ""): "no vox_event",
    NOTES.replace("vox_event", "vox_evnet"): "unknown hook 'vox_evnet'",
    NOTES.replace("self, event", "self, happening"): "hook 'vox_event'",
}


@pytest.mark.parametrize("body", LEFT_OUT)
def test_one_that_cannot_be_loaded_is_left_out_and_told_of(body: str, site: Site) -> None:
    watch(site, "bad", body=body)
    good = watch(site, "good")
    (fault,) = faults_of(Observers())
    assert fault.startswith("tracker 'bad' is left out: ")
    assert LEFT_OUT[body] in fault
    assert len(good()) == 1


@dataclass(frozen=True)
class Hanging:
    """Where an observer hangs, the limit that ends it, and what is said."""

    limit: str
    seconds: float  # a process takes some to start
    said: str
    then: str = "pass"
    at_import: str = ""


HANGING = {
    "import": Hanging("LOAD_S", 2, "is left out: no answer in 2 s", at_import=HANG),
    "event": Hanging("EVENT_S", 1, "failed and was dropped: no answer in 1 s", HANG),
    "exit": Hanging(
        "FINISH_S",
        1,
        "was dropped: it has not finished 1 s after the run",
        at_import=f"import atexit; atexit.register(lambda: {HANG})",
    ),
}


@pytest.mark.parametrize("place", HANGING)
def test_one_that_hangs_is_dropped_when_its_time_is_up(
    place: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends, and with it what it has started."""
    case = HANGING[place]
    started_one = "note(__import__('subprocess').Popen(['sleep', '600']).pid)"
    heard = watch(site, "bad", case.then, f"{started_one}\n{case.at_import}")
    monkeypatch.setattr(host_observers, case.limit, case.seconds)
    observers = Observers()
    faults = observers.tell(EVENT)
    while place == "exit" and len(heard()) < 2:  # its second has to be that of the end
        time.sleep(0.01)
    assert [*faults, *observers.tell(END)] == [f"tracker 'bad' {case.said}"]
    begun = heard()[:1]  # on a busy machine perhaps not, but where it has ended
    assert begun or place == "import"
    assert all(gone(int(pid)) for pid in begun)


def gone(pid: int) -> bool:
    """Whether it has ended, within ten seconds: alone, or as a zombie that nobody waits for."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_one_that_falls_behind_is_dropped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(site, "bad", HANG)
    monkeypatch.setattr(host_observers, "WAITING", 3)
    observers = Observers()
    faults = [fault for _ in range(6) for fault in observers.tell(EVENT)]
    assert faults == ["tracker 'bad' fell behind and was dropped: 3 events wait for it"]


def test_one_that_dies_at_its_end_is_told_of(site: Site) -> None:
    watch(site, "bad", at_import="import atexit; atexit.register(lambda: os._exit(5))")
    assert faults_of(Observers(), EVENT) == [
        "tracker 'bad' failed and was dropped: its process ended with exit 5"
    ]


def test_one_with_a_newer_api_is_left_out_unimported(site: Site) -> None:
    site.add("newer", "raise AssertionError('imported')", manifest=OBSERVER, api="7.0")
    (fault,) = faults_of(Observers())
    assert "written for 7.0" in fault


def test_a_blocked_one_is_left_out_in_silence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = watch(site, "good")
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "good,tensorboard,wandb")
    assert faults_of(Observers(), EVENT) == []
    assert heard() == []


def test_an_event_of_a_backends_own_is_passed_over(site: Site) -> None:
    class Own(Event):
        name = "own"

    heard = watch(site, "good")
    assert faults_of(Observers(), Own()) == []
    assert heard() == [repr(END)]


def test_closing_ends_them_at_once(site: Site) -> None:
    told = site.folder / "told"
    os.mkfifo(told)
    watch(site, "slow", f"open({str(told)!r}, 'w').close(); {HANG}")
    observers = Observers()
    observers.tell(EVENT)
    told.read_bytes()  # waits until the observer opens it
    (feeder,) = [each._feeder for each in observers._listening]
    observers.close()
    observers.close()
    feeder.join(60)
    assert not feeder.is_alive()


def test_a_run_goes_on_without_an_observer_that_crashes(site: Site, tmp_path: Path) -> None:
    heard = watch(site, "good")
    watch(site, "bad", f"event.name == 'step' and {KILLED}")
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
    told = [e.message for e in events if isinstance(e, Notice) and e.level == "warning"]
    warnings = [text for text in told if "tracker" in text]
    assert warnings == ["tracker 'bad' failed and was dropped: its process was ended by SIGSEGV"]
    steps = [repr(event) for event in events if isinstance(event, StepDone)]
    assert [line for line in heard() if line.startswith("StepDone")] == steps
    assert len(steps) == 3
    assert warnings[0] in json.dumps((tmp_path / "run/telemetry.jsonl").read_text())
