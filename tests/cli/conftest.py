"""Fixtures for tests of commands."""

from tests.cli.fixtures import _clean_place, listed, others_disabled, site, vox

__all__ = ["_clean_place", "listed", "others_disabled", "site", "vox"]
