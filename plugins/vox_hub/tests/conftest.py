"""Fixtures for tests of commands and of whole runs."""

from tests.cli.fixtures import _clean_place, listed, site, vox
from tests.run.conftest import data, settings, tiny

__all__ = ["_clean_place", "data", "listed", "settings", "site", "tiny", "vox"]
