"""Tiny models and data for whole runs, and the command line."""

from tests.cli.fixtures import vox
from tests.run.conftest import data, settings, tiny

__all__ = ["data", "settings", "tiny", "vox"]
