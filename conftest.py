"""Shared by the tests of every distribution here: which of them this machine can run, that none of
them reads what the user has disabled, and that every line of telemetry which a run of theirs writes
is what docs/reference/telemetry.schema.json says.

Markers are declared in pyproject.toml. Fixtures live beside the tests that use them.
"""

from __future__ import annotations

import contextlib
import email
import functools
import gc
import json
import os
import pickle
import shutil
import signal
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from vox_testing.plugin import freeze_imports  # noqa: TID251  (of the tests, not of the core)

SCHEMA = Path(__file__).parent / "docs" / "reference" / "telemetry.schema.json"
PLUGINS = Path(__file__).parent / "plugins"
A_TEST = 300
"""Bytes of a file that count as much as another test in it."""

# A busy machine is no fault.
_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("vox", deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.load_profile("vox")


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A configuration folder of their own, for the processes that they start too. The
    trackers, which would watch every run of every test, are disabled there; their own tests have
    another folder."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "plugins.json").write_text('{"disabled": ["tensorboard", "wandb"]}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOX_CONFIG", str(folder))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, which would look at all that is imported again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _hardware_is_looked_at_once() -> Iterator[None]:
    """The probes of the plugins here are processes, three a run, and hundreds of tests run vox.
    What one has said stands while the environment that it reads is the same. A probe that a test
    has written is run each time, as all are in the processes that tests start."""
    from vox_core.host import probe

    run, known = probe._run, dict[object, bytes]()

    def once(file: Path, manifest: Any) -> bytes:
        if not file.is_relative_to(PLUGINS):
            return run(file, manifest)
        read = frozenset(each for each in os.environ.items() if not each[0].startswith("PYTEST"))
        if (key := (file, read)) not in known:
            known[key] = run(file, manifest)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_run", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _installed_files_are_parsed_once() -> Iterator[None]:
    """Every run discovers the plugins and compares versions: it parses some 110 METADATA files and
    30 of TOML, a fifth of the time of a short run. The same text is parsed once."""
    parse_metadata, parse_toml = email.message_from_string, tomllib.loads

    @functools.lru_cache(1000)
    def pickled(text: str) -> bytes:
        return pickle.dumps(parse_toml(text))

    def loads(text: str, **options: Any) -> dict[str, Any]:
        return parse_toml(text, **options) if options else pickle.loads(pickled(text))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(email, "message_from_string", functools.lru_cache(1000)(parse_metadata))
        patch.setattr(tomllib, "loads", loads)
        yield


@pytest.fixture(scope="session")
def told_well() -> Callable[[Any], list[str]]:
    """Faults of a line of telemetry, as an object."""
    from jsonschema import Draft202012Validator

    schema = json.loads(SCHEMA.read_text())
    # What holds if an event is of a kind; asking for one kind is a third of the work.
    validators = {
        rule["if"]["properties"]["event"]["const"]: Draft202012Validator(
            {**schema, "allOf": [rule["then"]]}
        )
        for rule in schema["allOf"]
    }

    def faults(line: Any) -> list[str]:
        if (event := line.get("event")) not in validators:
            return [f"{event} is no event of vox's"]
        return [error.message for error in validators[event].iter_errors(line)]

    return faults


@pytest.fixture(autouse=True)
def _telemetry_as_in_its_schema(
    request: pytest.FixtureRequest, told_well: Callable[[Any], list[str]]
) -> Iterator[None]:
    """Of the runs in a test's own folder, whichever process wrote them. A test that writes lines of
    another kind by hand says so with the marker `foreign_telemetry`."""
    marked = request.node.get_closest_marker("foreign_telemetry")
    if marked or "tmp_path" not in request.fixturenames:
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    yield
    for depth in ("*", "*/*", "*/*/*"):
        for file in filter(Path.is_file, folder.glob(f"{depth}/telemetry.jsonl")):
            *whole, _ = file.read_text(encoding="utf-8").split("\n")
            faults = {line: told_well(json.loads(line)) for line in whole}
            assert not {line: found for line, found in faults.items() if found}, file


@pytest.fixture(scope="session", autouse=True)
def _every_line_as_in_the_schema(told_well: Callable[[Any], list[str]]) -> Iterator[None]:
    """Of a run in a test's own process, wherever its folder is."""
    from vox_core.run import telemetry

    line_of = telemetry.line_of

    def checked(*arguments: Any) -> dict[str, Any]:
        line = line_of(*arguments)
        assert not (found := told_well(json.loads(json.dumps(line)))), (line, found)
        return line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "line_of", checked)
        yield


def pytest_configure() -> None:
    """Take Ctrl-C and SIGHUP back where a shell in the background, or nohup, had them ignored: the
    tests start programs that have to hear them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Tests import MLX by themselves, and it takes the BLAS that is there when it is imported.
    with contextlib.suppress(ImportError):
        from vox_mlx.blas import load_blas  # noqa: TID251  (of the tests, not of the core)

        load_blas()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One process more than cores, since tests wait for processes that they start; five at most."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    from vox_core.data.dataset_cache import cpus

    return min(cpus(), 4) + 1


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Freeze the imports of every test, not of the conformance suite's alone."""
    freeze_imports(item.config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, then those with many tests and lines, so that no process is left
    alone with a long one at the end. Skip `gpu` tests where there is no NVIDIA driver; asking torch
    would cost seconds."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)  # a conformance suite is many tests in one line
    sizes = {path: count * A_TEST + path.stat().st_size for path, count in tests.items()}
    items.sort(key=lambda item: (item.path not in slow, -sizes[item.path], item.path))
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
