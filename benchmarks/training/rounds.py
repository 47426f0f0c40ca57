"""Run a cell: documents, reference, and interleaved rounds of new processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.training import documents, gate, models
from benchmarks.training.cells import SORTED, Cell
from benchmarks.training.documents import Steps
from benchmarks.training.flops import step_flop
from benchmarks.training.result import Measured, Round, Work
from benchmarks.training.task import Answer, Device, Task
from vox_core import SPIN_COUNT
from vox_core.contract import AdapterSpec, OptimizerSpec
from vox_core.run.loop import learning_rate

SEED = 42
ADAPTER = AdapterSpec("lora", 16, 32.0, 0.0, ("all-linear",))
# A tenth of vox's default, which no speed depends on: Adam's first steps follow the sign of a
# gradient, and at 2e-4 rounding alone puts SmolLM2's bfloat16 losses 1 to 2 % off in two steps.
OPTIMIZER = OptimizerSpec(2e-5, "cosine", 0.03, 0.0, 1.0)
# Where each weight follows the sign, 2e-5 puts them 3 % off in one step, plain loops' as well.
FULL = replace(OPTIMIZER, lr=2e-6)
Say = Callable[[str], None]


class Bench:
    """Cells on one device, with folders for models and for what the runs leave.

    Args:
        cache: made models are kept here.
        work: everything else; can go afterwards.
    """

    def __init__(self, device: Device, cache: Path, work: Path, threads: int, say: Say) -> None:
        self._device, self._cache, self._work, self._say = device, cache, work, say
        count = str(threads)
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._env = {**os.environ, **quiet, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count}
        self._references: dict[str, Answer | str] = {}

    def measure(self, cell: Cell) -> Measured:
        """All rounds of a cell; none where there is no reference to hold them against."""
        task, steps = self._prepare(cell)
        reference = self._reference(cell, task)
        faults: dict[str, str] = {}
        count = cell.rounds if isinstance(reference, Answer) else 0
        by_length = None
        if SORTED in cell.trainers and count:
            by_length = self._sorted(cell, task, steps)
        rounds = [self._round(cell, task, number, faults) for number in range(count)]
        return Measured(
            cell=cell,
            tokens=documents.tokens(steps),
            flop=step_flop(models.shape_of(cell.model), steps, cell.method),
            reference=reference,
            tolerance=gate.TOLERANCE[cell.dtype],
            rounds=rounds,
            faults=faults,
            sorted=by_length,
        )

    def _sorted(self, cell: Cell, task: Task, steps: Steps) -> Work:
        """Write the documents sorted by length, and compute their reference."""
        made = documents.sorted_by_length(steps)
        told = _for_trainer(task, SORTED)
        documents.write(Path(told.documents), made)
        flop = step_flop(models.shape_of(cell.model), made, cell.method)
        return Work(documents.tokens(made), flop, self._reference(cell, told))

    def _prepare(self, cell: Cell) -> tuple[Task, Steps]:
        """The task of every trainer, but for its name, and the documents that it names."""
        folder = self._work / cell.id.replace("/", "-")
        folder.mkdir(parents=True)
        model = models.model_folder(cell.model, self._cache, self._device)
        models.write_start(folder / "start", model, ADAPTER, SEED)
        vocabulary = models.shape_of(cell.model).vocabulary
        text_N = models.text(cell.model, model)
        steps = documents.make_steps(cell.data, vocabulary, cell.steps, cell.per_step, text_N)
        documents.write(folder / "documents.json", steps)
        numbers = range(1, cell.steps + 1)
        optimizer = FULL if cell.method == "full" else OPTIMIZER
        task = Task(
            trainer="vox",
            model=str(model),
            adapter=str(folder / "start"),
            documents=str(folder / "documents.json"),
            out="",
            device=self._device,
            dtype=cell.dtype,
            quant=cell.quant,
            lrs=tuple(learning_rate(optimizer, n, cell.steps) for n in numbers),
            optimizer=optimizer,
            row_tokens=cell.row_tokens,
            rank=ADAPTER.rank,
            alpha=ADAPTER.alpha,
            seed=SEED,
            method=cell.method,
        )
        return task, steps

    def _reference(self, cell: Cell, task: Task) -> Answer | str:
        """The plain loop in float32, each document by itself, or why it failed; the same for every
        dtype of a model and its data."""
        order = Path(task.documents).stem
        work = f"{cell.method}/{cell.steps}/{cell.per_step}"
        key = f"{cell.model}/{cell.quant}/{cell.data}/{order}/{work}"
        if key not in self._references:
            self._say(f"{cell.id}: reference, {order}")
            told = replace(task, trainer="reference", dtype="fp32")
            self._references[key] = self._run(told, f"reference-{order}")
        return self._references[key]

    def _round(self, cell: Cell, task: Task, number: int, faults: dict[str, str]) -> Round:
        """Every trainer once, each round beginning with another, and the roof."""
        turn = number % len(cell.trainers)
        answers: dict[str, Answer] = {}
        for trainer in cell.trainers[turn:] + cell.trainers[:turn]:
            if trainer in faults:
                continue
            self._say(f"{cell.id}: round {number + 1} of {cell.rounds}: {trainer}")
            answer = self._run(_for_trainer(task, trainer), f"{trainer}-{number}")
            if isinstance(answer, str):
                faults[trainer] = answer
            else:
                answers[trainer] = answer
        return Round(answers, self._roof(cell))

    def _run(self, task: Task, name: str) -> Answer | str:
        """Run a trainer's process; return its answer, or the last line of its error."""
        folder = Path(task.documents).parent
        told, answered = folder / f"{name}.task.json", folder / f"{name}.answer.json"
        replace(task, out=str(folder / name)).write(told)
        module = [sys.executable, "-m", "benchmarks.training.worker", str(told), str(answered)]
        # As the command line has it.
        spin = {"GOMP_SPINCOUNT": SPIN_COUNT} if task.trainer == "vox" else {}
        done = self._process([*module, str(time.monotonic())], spin)
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
        if done.returncode < 0:
            return f"killed by signal {-done.returncode}, as when memory runs out"
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
        return Answer.read(answered)

    def _roof(self, cell: Cell) -> float:
        shape = cell.model.removesuffix(models.REAL)
        module = [sys.executable, "-m", "benchmarks.training.roof"]
        done = self._process([*module, shape, cell.dtype, self._device, str(cell.row_tokens)])
        done.check_returncode()
        return float(done.stdout)

    def _process(
        self, command: list[str], more: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.CompletedProcess[str]:
        environment = {**self._env, **more}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _for_trainer(task: Task, trainer: str) -> Task:
    """Return the task of a trainer, which names the documents in its order."""
    file = Path(task.documents)
    chosen = file.with_stem(f"{file.stem}-{SORTED}") if trainer == SORTED else file
    return replace(task, trainer=trainer, documents=str(chosen))
