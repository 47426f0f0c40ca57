"""The pytest plugin that selects the backend under test and the tests that apply to it.

An author names the backend in `pyproject.toml`, and imports the suite in one test file:

    [tool.pytest.ini_options]
    vox_backend = "mybackend"

    from vox_testing.suite import *  # noqa: F403

`--vox-backend ID` overrides that. If one session tests the backends of several packages, a test
file sets its own `VOX_BACKEND = "ID"`.

pytest finds this module by the entry point of vox-ml-testing. Without the suite it only adds an
option, and imports nothing of vox.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vox_testing.subject import Declared, Subject

NEEDS = "vox_needs"

pytest.register_assert_rewrite("vox_testing.suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--vox-backend` and the ini option of the same name."""
    what = "id of the backend that vox's conformance suite is for"
    parser.getgroup("vox").addoption("--vox-backend", metavar="ID", help=what)
    parser.addini("vox_backend", what)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, for `--strict-markers`."""
    config.addinivalue_line(
        "markers", f"{NEEDS}(**capabilities): skip where the backend does not declare these"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of a capability that the backend does not declare."""
    for mark in item.iter_markers(NEEDS):
        if reason := _declared(item).lacks(**mark.kwargs):
            pytest.skip(reason)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Freeze what the tests of the suite have imported."""
    if _DECLARED in item.config.stash:
        freeze_imports(item.config)


def freeze_imports(config: pytest.Config) -> None:
    """Hide the objects of imported modules from the garbage collector.

    Closing a model collects garbage, and with torch and transformers imported that takes 0.4 s, a
    third of the time of many tests.
    """
    if len(sys.modules) > config.stash.get(_FROZEN, 0) + 100:
        config.stash[_FROZEN] = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def vox_declared(request: pytest.FixtureRequest) -> Declared:
    """The manifest and hardware of the backend under test, without importing it."""
    return _declared(request.node)


@pytest.fixture(scope="module")
def vox_subject(vox_declared: Declared, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The backend under test, loaded, with a tiny model."""
    from vox_core.api.host import load_backend
    from vox_testing.subject import Subject

    backend = load_backend(vox_declared.found, "load")
    model = _make_model(vox_declared, tmp_path_factory.mktemp("model"))
    return Subject(vox_declared, backend, model)


def _declared(node: pytest.Item | pytest.Collector) -> Declared:
    """Return the declarations of this test's backend; its probe runs once per session."""
    from vox_testing.subject import Declared

    known, chosen = node.config.stash.setdefault(_DECLARED, {}), _backend_of(node)
    if chosen not in known:
        known[chosen] = Declared.of(chosen)
    return known[chosen]


_FROZEN = pytest.StashKey[int]()
_DECLARED: pytest.StashKey[dict[str, Declared]] = pytest.StashKey()


def _backend_of(node: pytest.Item | pytest.Collector) -> str:
    module = node.getparent(pytest.Module)
    named = getattr(module.obj, "VOX_BACKEND", None) if module else None
    chosen = node.config.getoption("--vox-backend") or named or node.config.getini("vox_backend")
    if not chosen:
        raise pytest.UsageError(
            'no backend to test: set vox_backend = "ID" in [tool.pytest.ini_options], '
            "or give --vox-backend ID"
        )
    return str(chosen)


def _make_model(declared: Declared, folder: Path) -> Path:
    """Make a Llama, which needs no other library, or a model of the first declared family."""
    from vox_testing.llama import write_llama
    from vox_testing.tiny import FAMILIES, make_model

    for family, (model_type, _) in FAMILIES.items():
        if not declared.lacks(family=model_type):
            return write_llama(folder) if family == "llama" else make_model(family, folder)
    pytest.skip("not declared: any family that vox can make a tiny model of")
