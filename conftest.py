"""What the tests of every distribution here share: which of them this machine can run.

Markers are declared in pyproject.toml. Fixtures live beside the tests that use them.
"""

from __future__ import annotations

import shutil
import signal

import pytest


def pytest_configure() -> None:
    """Take Ctrl-C back where a shell started the suite in the background and so had it ignored:
    the tests start programs that have to hear it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no NVIDIA driver; asking torch would cost seconds."""
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
