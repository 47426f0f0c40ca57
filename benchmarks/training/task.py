"""Task of a trainer's process, and its answer, as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from vox_core.contract import DType, Method, OptimizerSpec, Quant

Device: TypeAlias = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Task:
    """A training from start to saved adapter.

    Args:
        model, adapter: folders; `adapter` holds what LoRA training starts from, in PEFT's layout.
        documents: file of documents.py.
        out: folder for the trained adapter or model.
        lrs: the rate of each step; the same for everybody.
        row_tokens: what a trainer that may choose computes at once.
        rank, alpha: of the adapter, as its folder says too.
    """

    trainer: str
    model: str
    adapter: str
    documents: str
    out: str
    device: Device
    dtype: DType
    quant: Quant
    lrs: tuple[float, ...]
    optimizer: OptimizerSpec
    row_tokens: int
    rank: int
    alpha: float
    seed: int
    method: Method = "lora"

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(file: Path) -> Task:
        told = json.loads(file.read_text())
        optimizer = OptimizerSpec(**told.pop("optimizer"))
        return Task(**{**told, "lrs": tuple(told["lrs"]), "optimizer": optimizer})


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a task. Times are seconds since the command was given.

    Args:
        marks: when each step was done, its loss known.
        saved: when the adapter or model was on the disk.
        moved: norm of all B together, which begin at 0; with the method `full`, of what changed.
        memory: bytes, by kind: `rss`, and on a GPU `allocated` and `reserved`; peaks.
        attention, layout: how it computed: by which function, and how documents lay in rows.
    """

    losses: list[float]
    marks: list[float]
    saved: float
    moved: float
    memory: dict[str, int] = field(default_factory=dict)
    attention: str = ""
    layout: str = ""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(file: Path) -> Answer:
        return Answer(**json.loads(file.read_text()))


@dataclass(slots=True)
class Diary:
    """Records a trainer's steps, and its attention and layout."""

    losses: list[float] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    attention: str = ""
    layout: str = ""

    def step(self, loss: float) -> None:
        """Record a finished step; the device has no work of it left."""
        import time

        self.losses.append(loss)
        self.marks.append(time.monotonic())
