"""Fixtures for tests of commands."""

from tests.cli.fixtures import _clean_place, vox

__all__ = ["_clean_place", "vox"]
