"""What the tests of every distribution here share: which of them this machine can run, and that
none of them reads what the user has disabled.

Markers are declared in pyproject.toml. Fixtures live beside the tests that use them.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A configuration folder of their own, for the processes that they start too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOX_CONFIG", str(tmp_path_factory.mktemp("config")))
        yield


def pytest_configure() -> None:
    """Take Ctrl-C back where a shell started the suite in the background and so had it ignored:
    the tests start programs that have to hear it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests import MLX by themselves, and it takes the BLAS that is there when it is imported.
    with contextlib.suppress(ImportError):
        from vox_mlx.blas import load_blas  # noqa: TID251  (of the tests, not of the core)

        load_blas()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no process is left alone with one at the end. Skip `gpu`
    tests where there is no NVIDIA driver; asking torch would cost seconds."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
