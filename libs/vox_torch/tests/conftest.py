"""Tiny models, made once a session; the engine's tests change none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vox_testing.tiny import make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(family, dtype=..., shard=...)` -> folder."""
    made: dict[tuple[object, ...], Path] = {}

    def make(family: str, **options: str) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = make_model(family, tmp_path_factory.mktemp(family), **options)
        return made[key]

    return make
