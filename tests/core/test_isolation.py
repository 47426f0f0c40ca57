"""Nine kinds of broken plugin, each really installed, against every command that must not mind.

Each kind gets a virtual environment of its own, with one good backend (the CPU's, from the
environment of these tests) and the broken plugin in its site-packages. Commands run as processes of
that environment, with a time limit.
"""

from __future__ import annotations

import json
import os
import sysconfig
import venv
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from tests.core.plugin_site import MANIFEST, WORKS, Site
from tests.core.warm import Warm
from vox_core.host.discover import discover
from vox_testing.tiny import make_model

LIMIT_S = 120
TRAINING_LIMIT_S = 300
"""Importing torch takes most of it where many tests run at once; a plugin that hangs takes 600."""
ORDINARY = MANIFEST.replace("1000000", "0")
"""Of lower priority than the CPU backend, which is to be chosen."""


OTHERS = {"VOX_DISABLE_PLUGINS": ",".join(each.id for each in discover() if each.id != "cpu")}
"""Are installed where these tests run; each would be a process more for every command."""

Codes: TypeAlias = tuple[int, ...]


class Kind(NamedTuple):
    """How to install it, the status that `list` gives it, and what `doctor` finds."""

    install: Callable[[Site], object]
    status: str
    finding: str


def _that(body: str) -> Callable[[Site], object]:
    return lambda site: site.add("bad", f"{body}\n{WORKS}", manifest=ORDINARY)


def _twice(site: Site) -> None:
    site.add("bad", manifest=ORDINARY)
    site.add("bad", manifest=ORDINARY, distribution="vox-y-bad", package="vox_y_bad")


KINDS = {
    "ImportError": Kind(_that("import vox_x_nothing"), "installed", "No module named 'vox_x_noth"),
    "SystemExit": Kind(_that("raise SystemExit(0)"), "installed", "SystemExit: 0"),
    "segfault": Kind(
        _that("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), "installed", "SIGSEGV"
    ),
    "hang": Kind(_that("import time; time.sleep(600)"), "installed", "did not end in 5 s"),
    "stdout": Kind(
        _that("import os; print('hello'); os.write(1, b'hello')"), "installed", "loads; has vox_l"
    ),
    "bad manifest": Kind(lambda site: site.add("bad", manifest="id = 5"), "broken", "id: input sh"),
    "no manifest": Kind(lambda site: site.add("bad", manifest=None), "broken", "has no manifest"),
    "newer API": Kind(
        lambda site: site.add("bad", manifest=ORDINARY, api="7.0"), "incompatible", "upgrade vox-ml"
    ),
    "duplicate id": Kind(_twice, "broken", "defined more than once"),
}

TRAINED_BESIDE = ("hang",)
"""A training in a process of its own imports torch; the others are in the long form."""
NEVER_LOADED = ("ImportError", "SystemExit", "segfault", "stdout")
"""All the same to what loads no plugin, where one that hangs shows it best; in the long form."""


class Place:
    """A virtual environment with a broken plugin, and vox in it."""

    def __init__(self, folder: Path, kind: str) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin/python"
        (site_packages,) = folder.glob("lib/python*/site-packages")
        outer = sysconfig.get_path("purelib")
        (site_packages / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
        self.site = Site(site_packages)
        self.folder = folder
        KINDS[kind].install(self.site)
        own = {"VOX_CONFIG": "config", "VOX_CACHE": "cache", "OMP_NUM_THREADS": "1", **OTHERS}
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._environ = {**kept, **own}
        self._warm = Warm(self.python, self._environ)

    def vox(self, *arguments: object, limit_s: float = LIMIT_S, codes: Codes = (0,)) -> str:
        """Run `vox`, which has to exit with one of `codes`; gives what it prints on stdout."""
        done = self._warm.run(arguments, self._environ, self.folder, limit_s)
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    def json(self, *arguments: object, limit_s: float = LIMIT_S, codes: Codes = (0,)) -> Any:
        """The same, for one JSON document and nothing else."""
        return json.loads(self.vox(*arguments, "--json", limit_s=limit_s, codes=codes))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Place]:
    return cache(lambda kind: Place(tmp_path_factory.mktemp("venv"), kind))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def place(places: Callable[[str], Place], kind: str) -> Place:
    return places(kind)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    file.write_text('{"prompt": "Which?", "completion": "That one."}\n')
    return file


def of(id: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in items if item["id"] == id]


def test_help(place: Place) -> None:
    assert place.vox("--help").startswith("Usage: vox")


def test_list(place: Place, kind: str) -> None:
    listed = place.json("plugin", "list")
    assert {each["status"] for each in of("bad", listed)} == {KINDS[kind].status}
    assert all(each["reason"] for each in listed)
    assert [each["status"] for each in of("cpu", listed)] == ["installed"]


def test_info(place: Place, kind: str) -> None:
    facts = place.json("plugin", "info", "bad")
    assert {each["status"] for each in facts["listed"]} == {KINDS[kind].status}
    assert [bool(each["fault"]) for each in facts["installed"]] == [
        KINDS[kind].status == "broken"
    ] * len(facts["listed"])


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "hang"])
def test_doctor(places: Callable[[str], Place], kind: str) -> None:
    codes = (0,) if kind == "stdout" else (1,)
    examined = places(kind).json("plugin", "doctor", "bad", "--timeout", 5, codes=codes)
    for bad in of("bad", examined):
        assert KINDS[kind].finding in json.dumps(bad["checks"])
        assert bad["ok"] == (kind == "stdout")  # a bad habit, and no fault
    assert of("bad", examined)


def test_the_doctor_ends_one_that_hangs_and_looks_at_the_others(
    places: Callable[[str], Place],
) -> None:
    examined = places("hang").json("plugin", "doctor", "--timeout", 5, codes=(1,))
    (bad,) = of("bad", examined)
    assert not bad["ok"] and KINDS["hang"].finding in json.dumps(bad["checks"])
    assert [each["ok"] for each in of("cpu", examined)] == [True]


def test_explain(place: Place) -> None:
    told = place.json("backend", "explain")
    assert told["chosen"] == "cpu"
    assert of("bad", told["verdicts"])
    assert all(verdict["reason"] for verdict in told["verdicts"])


@pytest.mark.parametrize(
    "kind",
    [
        each if each in TRAINED_BESIDE else pytest.param(each, marks=pytest.mark.long)
        for each in KINDS
    ],
)
def test_train_with_another_backend(
    places: Callable[[str], Place], model: Path, data: Path, kind: str
) -> None:
    place = places(kind)
    flags = {"model": model, "data": data, "out": "run", "backend": "cpu", "max-steps": 1}
    given = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
    report = place.json("train", *given, limit_s=TRAINING_LIMIT_S)
    assert report["steps"] == 1
    assert (place.folder / "run/adapter_model.safetensors").is_file()
    selection = json.loads((place.folder / "run/preflight.json").read_text())["selection"]
    assert of("bad", selection["verdicts"])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each, marks=pytest.mark.long) if each in NEVER_LOADED else each
        for each in KINDS
    ],
)
def test_remove(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, kind)
    name = "vox-x-bad" if kind == "duplicate id" else "bad"  # of two with one id, which?
    place.vox("plugin", "remove", name, "--yes")
    assert not list(place.site.folder.glob("vox_x_bad*"))
    left = [each["status"] for each in of("bad", place.json("plugin", "list"))]
    assert left == (["installed"] if kind == "duplicate id" else [])
