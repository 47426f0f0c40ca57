"""Fixtures of the server that the engines are for."""

from __future__ import annotations

from plugins.vox_serve.tests.conftest import folders, trained
from tests.cli.fixtures import _clean_place, vox

__all__ = ["_clean_place", "folders", "trained", "vox"]
