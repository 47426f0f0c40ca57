"""Adapters of samplers in memory: which one leaves for another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vox_tinker import sampling
from vox_tinker.sampling import Adapters


@pytest.fixture
def memory(monkeypatch):
    """Adapters with room for two; `loaded` and `left` are names of folders, in order."""
    loaded, left, forgotten = [], [], []
    generator = SimpleNamespace(forget=forgotten.append)
    trainer = SimpleNamespace(
        add_adapter=lambda name, _: loaded.append(_folder(name)),
        remove_adapter=lambda name: left.append(_folder(name)),
    )
    monkeypatch.setattr(sampling, "LOADED", 2)
    monkeypatch.setattr(Adapters, "_read", lambda self, folder: None)
    adapters = Adapters(SimpleNamespace(generator=generator, trainer=trainer))
    yield SimpleNamespace(adapters=adapters, loaded=loaded, left=left)
    assert [*map(_folder, forgotten)] == left, "the cache of prompts lets go of the same ones"


def _folder(name):
    return name.partition(" ")[0].rpartition("/")[2]


@pytest.fixture
def use(memory, tmp_path):
    """`use("a")` acquires the adapter in the folder `a`, and releases it."""

    def used(name):
        (tmp_path / name).mkdir(exist_ok=True)
        memory.adapters.release(memory.adapters.acquire(tmp_path / name))

    return used


def test_the_least_recently_used_adapter_leaves(memory, use):
    for name in "abac":
        use(name)
    assert (memory.loaded, memory.left) == (["a", "b", "c"], ["b"])
    use("b")
    assert memory.left == ["b", "a"]


def test_an_adapter_in_use_stays(memory, use, tmp_path):
    (tmp_path / "a").mkdir()
    held = [memory.adapters.acquire(tmp_path / "a") for _ in "12"]
    use("b")
    use("c")
    assert memory.left == ["b"]
    memory.adapters.release(held[0])
    use("d")
    assert memory.left == ["b", "c"], "one of its two requests has not ended"
    memory.adapters.release(held[1])
    use("e")
    assert memory.left == ["b", "c", "a"]
