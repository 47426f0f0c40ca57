"""Disks that fail, and processes that die, for the tests of checkpoints. No torch here.

made_up        a state, and the one after it: a run without a model
saving         when to save, and how many checkpoints to keep
Counted        knows which call is the how-manieth
Failing        the K-th call fails, or every one from there on
Killing        the process is killed at the K-th call, or half-way through a write
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vox_core.config import TrainSettings, validate
from vox_core.contract import AdapterState, LowRank, TrainState
from vox_core.files import Calls

RUN = {"contract": "c" * 64, "seed": 7}
# What asks a disk for room; taking things away works on a full one.
GROWING = ("create", "append", "write", "fsync", "mkdir", "rename")


def made_up(step: int, wide: int = 16) -> TrainState:
    """A state whose every number is a function of `step`."""
    random = np.random.default_rng(step)

    def floats(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    modules = {
        f"model.layers.{n}.q_proj": LowRank(floats(4, wide), floats(wide, 4), 8.0) for n in range(2)
    }
    adapter = AdapterState("lora", modules, {"lm_head.weight": floats(3, wide)})
    moments = {
        name: (floats(*value.shape), floats(*value.shape) ** 2)
        for name, value in adapter.tensors().items()
    }
    return TrainState(step, adapter, moments)


def saving(**given: object) -> TrainSettings:
    """Settings of a run; without any the only checkpoint is that of its end."""
    return validate(TrainSettings, {"save_every": 0, **given})


def same(one: TrainState, other: TrainState) -> bool:
    """Bit for bit."""

    def bits(state: TrainState) -> dict[str, bytes]:
        halves = {
            f"{name}/{half}": pair[half].tobytes()
            for name, pair in state.moments.items()
            for half in (0, 1)
        }
        return {n: v.tobytes() for n, v in state.adapter.tensors().items()} | halves

    return one.step == other.step and bits(one) == bits(other)


def intercepted(before: Callable[[Any, str, tuple[Any, ...]], Any]) -> Callable[[type], type]:
    """Make a subclass of `Calls` whose every call asks `before(self, name, arguments)` first; what
    that returns, if anything, is the call's result."""

    def decorate(kind: type) -> type:
        for name in [n for n in vars(Calls) if not n.startswith("_")]:

            def method(self: Any, *arguments: Any, _name: str = name) -> Any:
                result = before(self, _name, arguments)
                return getattr(Calls, _name)(self, *arguments) if result is None else result

            setattr(kind, name, method)
        return kind

    return decorate


def _count(self: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    if name == "close":  # changes nothing on a disk
        return None
    self.made.append(name)
    return self.reached(name, arguments)


@intercepted(_count)
class Counted(Calls):
    """Keeps the names of the calls made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def reached(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return None


class Failing(Counted):
    """The call number `at` fails with `number`; with `stays`, so do all that ask for more after it.

    `number` None is a short write: one byte of those that were to be written.
    """

    def __init__(self, at: int, number: int | None, stays: bool = False) -> None:
        super().__init__()
        self._at, self._number, self._stays = at, number, stays

    def reached(self, name: str, arguments: tuple[Any, ...]) -> Any:
        now = len(self.made)
        if now != self._at and not (self._stays and now > self._at and name in GROWING):
            return None
        if self._number is None:
            if name != "write":
                return None
            return os.write(arguments[0], bytes(memoryview(arguments[1])[:1]))
        if name == "write" and self._number:  # as a disk does that has a little room left
            os.write(arguments[0], bytes(memoryview(arguments[1])[:5]))
        raise OSError(self._number, os.strerror(self._number))


class Killing(Counted):
    """SIGKILL at call number `at`; with `half`, after half of what is to be written."""

    def __init__(self, at: int, half: bool = False) -> None:
        super().__init__()
        self._at, self._half = at, half

    def reached(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if len(self.made) != self._at:
            return None
        if self._half and name == "write":
            data = bytes(memoryview(arguments[1]))
            os.write(arguments[0], data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("alive")


def leftovers(folder: Path) -> list[str]:
    """Whatever is in the folder beside checkpoints, whole ones and those set aside."""
    return [p.name for p in folder.rglob("*") if p.name.startswith(".tmp-")]
