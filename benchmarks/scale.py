"""A model of the time of a step on N processes, held against measured steps.

    python -m benchmarks.scale OUT [ROUNDS]

Short runs of SmolLM2-135M in bfloat16 with one thread per process, on the quick start's data. Two
runs of one process and one of two give the constants of computing; the exchange of gradients is
timed alone, between two processes that compute nothing. All other runs are predicted: four
processes, another `--micro-batch-tokens`, another batch size and LoRA rank. Runs are interleaved,
and of ROUNDS rounds (2 by default) the fastest time of each step counts. docs/guide/scale.md has
the formulas.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.many_processes import DATA, events, train
from vox_core.config import TrainSettings, validate
from vox_core.contract import World
from vox_core.data import batching
from vox_core.data.batching import share_of
from vox_core.run.run_plan import plan_run
from vox_torch.ranks import PIECE

BASE = 134_515_008
"""Parameters of SmolLM2-135M; its head is the embedding."""
PIECE_BYTES = 4 * PIECE
STEPS = 3
"""Steps of a run that count, after a first one."""


@dataclass(frozen=True)
class Cell:
    """A run: processes, `--micro-batch-tokens`, `--batch-size` and LoRA rank."""

    processes: int
    micro: int
    batch: int = 16
    rank: int = 16


FITTED = (Cell(1, 128), Cell(1, 512), Cell(2, 128))
PREDICTED = (
    *(Cell(4, 128), Cell(2, 512)),
    *(Cell(n, 256, batch=24, rank=64) for n in (1, 2, 4)),
)


@dataclass(frozen=True)
class Wire:
    """Seconds per message, and bytes per second that are sent and that are added."""

    latency: float
    sent: float
    added: float

    def chain(
        self,
        gradient: float,
        kept: Sequence[int],
        ways: float = math.inf,
        piece_bytes: int = PIECE_BYTES,
    ) -> float:
        """Seconds in which ranks add gradients of so many bytes, and the total goes back to all.

        Args:
            kept: micro-batches of each rank; those of the first are in its sum already.
            ways: messages that can be on the way at once; on one machine half its cores, as
                sending and receiving takes one each.
        """
        others = len(kept) - 1
        if not others:
            return 0.0
        pieces = math.ceil(gradient / piece_bytes)
        piece = gradient / pieces
        send = self.latency + piece / self.sent
        added = [count * piece / self.added for count in kept[1:]]
        total = 0.0
        for add in (added, [0.0] * others):
            first = others * send + sum(add)
            # A rank between two others receives a piece, adds to it and sends it on.
            slowest = max(add) + min(2, others) * send
            total += max(first + (pieces - 1) * slowest, pieces * first / min(ways, others))
        return total


@dataclass(frozen=True)
class Machine:
    """Constants of a machine, for processes of one thread.

    Attributes:
        start: seconds of a micro-batch beside its tokens.
        flop: of one core, in a second.
        crowded: factor on the time of a core while all cores compute.
    """

    cores: int
    start: float
    flop: float
    crowded: float
    wire: Wire

    def step(self, sizes: Sequence[int], trained: int, processes: int) -> float:
        """Seconds of a step of micro-batches of so many tokens."""
        shares = [share_of(sizes, World(rank, processes)) for rank in range(processes)]
        busy = [sum(self.batch(sizes[n], trained) for n in share) for share in shares]
        crowded = self.crowded if processes > 1 else 1.0
        computed = crowded * max(*busy, sum(busy) / min(processes, self.cores))
        reduced = self.wire.chain(4 * trained, [len(share) for share in shares], self.cores / 2)
        return computed + reduced

    def batch(self, tokens: int, trained: int) -> float:
        """Seconds of a micro-batch, on one core."""
        return self.start + tokens * flop(trained) / self.flop


def flop(trained: float, base: float = BASE) -> float:
    """Floating-point operations of a token: of the frozen base a product forward and one backward,
    of the adapter one more."""
    return 4 * base + 6 * trained


def settings_of(cell: Cell) -> dict[str, object]:
    return {
        "model": "smollm2-135m",
        "data": [str(DATA / "train.jsonl")],
        "dtype": "bf16",
        "allow-cpu": True,
        "tune": "ignore",
        "batch-size": cell.batch,
        "micro-batch-tokens": cell.micro,
        "rank": cell.rank,
        "alpha": 2 * cell.rank,
        "max-steps": STEPS + 1,
    }


def cut(cell: Cell, out: Path) -> tuple[list[list[int]], int]:
    """Return the tokens of each micro-batch of the steps that count, and the trained parameters."""
    given = {name.replace("-", "_"): value for name, value in settings_of(cell).items()}
    plan = plan_run(validate(TrainSettings, {**given, "backend": "cpu", "out": out / "none"}))
    steps = range(2, STEPS + 2)
    sizes, data = [], plan.data.train
    for step in steps:
        chosen = batching.documents_in_step(data, cell.batch, plan.contract.seed, step)
        documents = [data[index] for index in chosen]
        batches, _ = batching.cut(documents, cell.micro, plan.execution.packing)
        sizes.append([len(batch.tokens_T) for batch in batches])
    return sizes, plan.trained_elements


def measure(cells: Sequence[Cell], out: Path, rounds: int) -> dict[Cell, list[float]]:
    """Train every cell once a round; return the fastest seconds of each step."""
    found: dict[Cell, list[list[float]]] = {cell: [] for cell in cells}
    for number in range(rounds):
        for cell in cells:
            run = out / f"{cell.processes}-{cell.micro}-{cell.batch}-{cell.rank}-{number}"
            given = settings_of(cell)
            flags = [
                part
                for name, value in given.items()
                for part in ([f"--{name}"] if value is True else [f"--{name}", *_listed(value)])
            ]
            train(*flags, "--out", run, processes=cell.processes)
            found[cell].append([step["seconds"] for step in events(run, "step")[1:]])
    return {cell: np.min(times, axis=0).tolist() for cell, times in found.items()}


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def fit(
    seconds: dict[Cell, list[float]], steps: dict[Cell, tuple[list[list[int]], int]], wire: Wire
) -> Machine:
    """The constants of computing: of one process by least squares of relative errors, then the
    factor for several."""
    rows, times = list[list[float]](), list[float]()
    for cell in (cell for cell in FITTED if cell.processes == 1):
        sizes, trained = steps[cell]
        rows += [[len(each), sum(each) * flop(trained)] for each in sizes]
        times += seconds[cell]
    took = np.array(times)
    relative = np.array(rows) / took[:, None]
    scale = relative.max(0)
    start, slowness = np.linalg.lstsq(relative / scale, np.ones(len(took)), rcond=None)[0] / scale
    machine = Machine(os.cpu_count() or 1, float(start), float(1 / slowness), 1.0, wire)
    cell = FITTED[-1]
    sizes, trained = steps[cell]
    ideal = sum(machine.step(each, trained, cell.processes) for each in sizes)
    reduced = ideal - sum(
        replace(machine, wire=Wire(0, math.inf, math.inf)).step(each, trained, cell.processes)
        for each in sizes
    )
    crowded = (sum(seconds[cell]) - reduced) / (ideal - reduced)
    return replace(machine, crowded=float(crowded))


SIZE, KEPT = 40_000_000, 4
"""Bytes of the gradients that are exchanged alone, and how many each rank adds."""


def timed_wire(out: Path, cores: int) -> Wire:
    """Time `gather_sum` between two processes; predict three and four."""
    small, large, added = exchanges(out, 2)
    pieces = math.ceil(SIZE / PIECE_BYTES)
    latency = small / 2  # there and back
    sent = 2 * SIZE / (large - 2 * pieces * latency)
    wire = Wire(latency, sent, KEPT * SIZE / (added - large))
    for processes in (3, 4):
        for kept, took in zip((0, KEPT), exchanges(out, processes)[1:], strict=True):
            predicted = wire.chain(SIZE, [kept] * processes, cores / 2)
            print(f"exchange of {processes}, {kept} added: predicted {1e3 * predicted:.0f} ms, "
                  f"measured {1e3 * took:.0f} ms, {predicted / took - 1:+.1%}")  # fmt: skip
    return wire


def exchanges(out: Path, processes: int) -> list[float]:
    """Return the seconds of `gather_sum` of few bytes, of many, and of many with parts to add."""
    store = out / f"store-{processes}-{time.monotonic_ns()}"
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(partial(exchange, store, processes), range(processes)))
    longest: list[float] = np.max(found, axis=0).tolist()
    return longest


def exchange(store: Path, processes: int, rank: int) -> list[float]:
    cases = [(4096, 0, PIECE), (SIZE, 0, PIECE), (SIZE, KEPT, PIECE)]
    return timed_sums(store, processes, rank, cases, interface="lo", times=20)


def timed_sums(
    store: Path,
    processes: int,
    rank: int,
    cases: Sequence[tuple[int, int, int]],
    *,
    interface: str,
    times: int,
) -> list[float]:
    """Return the least seconds of `gather_sum` on this rank.

    Args:
        cases: bytes of the gradient, how many each rank above 0 adds, and numbers of a piece.
    """
    import torch

    from vox_torch import ranks as module

    os.environ.update({module.RENDEZVOUS: str(store), "GLOO_SOCKET_IFNAME": interface})
    torch.set_num_threads(1)
    ranks, found = module.Ranks(World(rank, processes)), []
    for size, kept, module.PIECE in cases:
        total = torch.ones(size // 4)
        parts = [torch.ones(size // 4) for _ in range(kept if rank else 0)]
        taken = []
        for _ in range(times):
            ranks.share(np.zeros(1))
            began = time.perf_counter()
            ranks.gather_sum(total, parts)
            taken.append(time.perf_counter() - began)
        found.append(min(taken))
    ranks.close()
    return found


@dataclass(frozen=True)
class Base:
    """A base in bfloat16 with a LoRA adapter of rank 16 on all linear modules."""

    name: str
    parameters: float
    matrices: float
    layers: int
    trained: float


BASES = (Base("8B", 8.03e9, 6.98e9, 32, 41.9e6), Base("70B", 70.6e9, 68.5e9, 80, 207e6))
"""Of the shapes of Llama 3."""
DEVICES = {
    "two such cores, 10 Gbit/s": (2.5e11, Wire(150e-6, 1.25e9, 10e9)),
    "400 TFLOP/s, 400 Gbit/s": (4.0e14, Wire(20e-6, 50e9, 1e12)),
}
"""Operations per second and the network of a device. Assumed, not measured."""
BATCHES, TOKENS = 4, 4096
"""Micro-batches of a rank in a step, and the tokens of one."""


def forecast() -> None:
    """Print what the model says of many devices, one process on each."""
    for base in BASES:
        for name, (flops, wire) in DEVICES.items():
            for processes in (8, 64, 1024):
                computed = BATCHES * TOKENS * flop(base.trained, base.parameters) / flops
                reduced = wire.chain(4 * base.trained, [BATCHES] * processes)
                loaded = BATCHES * gathered(base, processes, wire)
                print(
                    f"{base.name}, {processes} devices of {name}: compute {computed:.3g} s, "
                    f"reduce {reduced:.2g} s, load with --shard {loaded:.3g} s"
                )


def gathered(base: Base, processes: int, wire: Wire) -> float:
    """Seconds in which a micro-batch's layers are gathered twice, around a ring."""
    others = processes - 1
    sent = 2 * base.matrices / processes * others / wire.sent
    return 2 * (sent + base.layers * others * wire.latency)


def main(out: Path, rounds: int) -> bool:
    cells = [*FITTED, *PREDICTED]
    steps = {cell: cut(cell, out) for cell in cells}
    out.mkdir(parents=True, exist_ok=True)
    wire = timed_wire(out, os.cpu_count() or 1)
    seconds = measure(cells, out, rounds)
    machine = fit(seconds, steps, wire)
    print(machine)
    worst = 0.0
    for cell in cells:
        sizes, trained = steps[cell]
        predicted = [machine.step(each, trained, cell.processes) for each in sizes]
        apart = sum(predicted) / sum(seconds[cell]) - 1
        fitted = cell in FITTED
        worst = worst if fitted else max(worst, abs(apart))
        print(
            f"{cell}: {len(sizes[0])} micro-batches, predicted {sum(predicted) / STEPS:.2f} s, "
            f"measured {sum(seconds[cell]) / STEPS:.2f} s, {apart:+.1%}"
            f"{' (fitted)' if fitted else ''}"
        )
    print(f"largest error of a prediction: {worst:.1%}")
    forecast()
    return worst <= 0.15


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    sys.exit(not main(Path(folder), int(rest[0]) if rest else 2))
