"""Training with vox's preference objectives against TRL 1.16's trainers, step by step, in float32.

    python3 -m venv ENV
    ENV/bin/pip install -c constraints.txt torch==2.13.0 trl==1.16 peft transformers
    .venv/bin/python benchmarks/preference_against_trl.py --trl ENV/bin/python
    .venv/bin/python benchmarks/preference_against_trl.py --backend cpu --backend mlx dpo-sigmoid

Each case is a whole `vox train` of 20 steps of 4 rows: LoRA on all linear layers, AdamW, clipping.
TRL's trainer (`trl_trainer.py`, in an environment of its own) begins with the same adapter and gets
the same documents as tokens, in vox's order. Backends are held against TRL and one another.

Columns: the largest relative difference of a step's loss; that of the final adapter, the Frobenius
norm over all its tensors; and the same relative to how far training moved the adapter, as A begins
far from zero. Exits with 1 if a loss is more than 1e-5 apart, or an adapter more than 1e-4.

The bounds are for float32, whose rounding is 6e-8: a tiny model keeps them at a rate of 1e-3. With
30 layers that rate amplifies roundoff from step to step: DPO on SmolLM2 ends 2.3e-5 and 1.5e-4
apart, with a float64 run between both. So SmolLM2 is compared at 5e-5, the upper end of what people
use for DPO with LoRA, on short rows without the template, to bound the time:

    ... --trl ENV/bin/python --model smollm2-135m --lr 5e-5 --words 4 --plain

Where vox and TRL differ on purpose, the cases go around it:

- TRL's ORPO has the prompt in its likelihood: prompts have one token here, which nothing predicts,
  and the model's chat template is left out.
- TRL's KTO draws mismatched answers for the KL by its own order: it gets vox's.
- TRL's DPO ignores label_smoothing with sigmoid: 2 (1 - e) sigmoid - (1 - 2 e) robust equals it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vox_core import models
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.adapter.targets import linear_modules
from vox_core.config import TrainSettings, validate
from vox_core.contract import Batch, Place, Step
from vox_core.run.hf_checkpoint import seeded
from vox_core.run.loop import steps_of
from vox_core.run.run_plan import RunPlan, plan_run
from vox_core.run.train import train
from vox_testing.tiny import make_model

Losses = list[float]
Tensors = Mapping[str, Any]

LOSS, ADAPTER = 1e-5, 1e-4
ROWS = 30  # 20 steps of 4 rows are more than two epochs
OPTIMIZER = {"schedule": "constant", "warmup": 0.0, "clip": 1.0}
SMOOTHING = 0.2


@dataclass(frozen=True)
class Case:
    """An objective and its settings for vox, and a trainer and its settings for TRL."""

    objective: str
    options: dict[str, str]
    trainer: str
    settings: dict[str, Any]


CASES = {
    "dpo-sigmoid": Case("dpo", {"beta": "0.1"}, "dpo", {"beta": 0.1}),
    "dpo-ipo": Case(
        "dpo", {"loss_type": "ipo", "beta": "0.1"}, "dpo", {"loss_type": ["ipo"], "beta": 0.1}
    ),
    "dpo-hinge": Case(
        "dpo", {"loss_type": "hinge", "beta": "0.1"}, "dpo", {"loss_type": ["hinge"], "beta": 0.1}
    ),
    "dpo-robust": Case(
        "dpo",
        {"loss_type": "robust", "beta": "0.1", "label_smoothing": str(SMOOTHING)},
        "dpo",
        {"loss_type": ["robust"], "beta": 0.1, "label_smoothing": SMOOTHING},
    ),
    "cdpo": Case(
        "dpo",
        {"beta": "0.1", "label_smoothing": str(SMOOTHING)},
        "dpo",
        {
            "loss_type": ["sigmoid", "robust"],
            "loss_weights": [2 * (1 - SMOOTHING), 2 * SMOOTHING - 1],
            "beta": 0.1,
            "label_smoothing": SMOOTHING,
        },
    ),
    "simpo": Case(
        "simpo",
        {"beta": "2", "gamma": "1"},
        "cpo",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
    ),
    "orpo": Case("orpo", {"beta": "0.1"}, "orpo", {"beta": 0.1}),
    "kto": Case(
        "kto",
        {"beta": "0.1", "desirable_weight": "1.3"},
        "kto",
        {"beta": 0.1, "desirable_weight": 1.3},
    ),
    "kto-apo_zero_unpaired": Case(
        "kto",
        {"beta": "0.1", "loss_type": "apo_zero_unpaired"},
        "kto",
        {"beta": 0.1, "loss_type": "apo_zero_unpaired"},
    ),
}


def write_rows(file: Path, case: Case, longest: int) -> Path:
    """Rows of the form that an objective takes, with answers of 1 to `longest` words."""
    draw, of_prompt = random.Random(5), max(1, longest * 2 // 3)

    def words(most: int) -> str:
        return " ".join(
            "".join(draw.choices("abcdefghij", k=draw.randint(1, 6)))
            for _ in range(draw.randint(1, most))
        )

    with file.open("w") as out:
        for number in range(ROWS):
            prompt = chr(ord("A") + number % 26) if case.objective == "orpo" else words(of_prompt)
            if case.objective == "kto":
                row = {"prompt": prompt, "completion": words(longest), "label": number % 3 != 0}
            else:
                row = {"prompt": prompt, "chosen": words(longest), "rejected": words(longest)}
            out.write(json.dumps(row) + "\n")
    return file


def without_template(model: Path, folder: Path) -> Path:
    """Return a copy of a model whose rows are plain text."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    return folder


def settings(
    case: Case, model: Path, rows: Path, backend: str, steps: int, lr: float, out: Path
) -> Any:
    given = {
        "model": str(model),
        "data": [rows],
        "backend": backend,
        "out": out,
        "objective": case.objective,
        "objective_options": case.options,
        "dtype": "fp32",
        "batch_size": 4,
        "max_steps": steps,
        # Several micro-batches to a step, and none of a pair's sides alone.
        "micro_batch_tokens": 128,
        "tune": "ignore",
        "rank": 8,
        "alpha": 16,
        "lr": lr,
        **OPTIMIZER,
    }
    return validate(TrainSettings, given)


def results(run: Path) -> tuple[Losses, Tensors]:
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"], read_adapter(run).tensors()


# --- the job for TRL ------------------------------------------------------------------------------


def document(batch: Batch, place: Place) -> dict[str, list[int]]:
    """Tokens of a document; weights of a batch are at the position before."""
    trained_T = batch.weights_T[place.extent] != 0
    return {
        "tokens": batch.tokens_T[place.extent].tolist(),
        "trained": [0, *trained_T[:-1].astype(int).tolist()],
    }


def groups_of(step: Step) -> list[dict[str, Any]]:
    return [
        {place.label: document(step.batches[place.batch], place) for place in group}
        for group in step.groups
    ]


def write_start(plan: RunPlan, folder: Path) -> Tensors:
    """Write the adapter that a run begins with as PEFT reads it."""
    weights, model_type = plan.inputs.weights, plan.contract.model.model_type
    state = seeded(plan.execution, weights)
    modules = linear_modules(weights.tensors, model_type)
    folder.mkdir(exist_ok=True)
    write_adapter(folder, state, base=str(plan.inputs.model.path), modules=modules)
    return state.tensors()


def train_with_trl(
    python: str, scratch: Path, plans: Mapping[str, RunPlan], lr: float
) -> dict[str, tuple[Losses, Tensors]]:
    cases = [
        {
            "model": str(plan.inputs.model.path),
            "trainer": CASES[name].trainer,
            "settings": CASES[name].settings,
            "steps": [groups_of(step) for step in steps_of(plan, 1)],
            "out": str(scratch / f"{name}-trl"),
        }
        for name, plan in plans.items()
    ]
    optimizer = {"learning_rate": lr, "max_grad_norm": OPTIMIZER["clip"]}
    job = {"adapter": str(scratch / "start"), "optimizer": optimizer}
    file = scratch / "job.json"
    file.write_text(json.dumps({**job, "cases": cases}))
    script = Path(__file__).with_name("trl_trainer.py")
    command = [python, str(script), str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script.name} failed:\n{done.stderr}")
    found = {}
    for name, case in zip(plans, cases, strict=True):
        out = Path(case["out"])
        losses = json.loads((out / "losses.json").read_text())
        found[name] = losses, read_adapter(out).tensors()
    return found


# --- the table ------------------------------------------------------------------------------------


def size(tensors: Sequence[Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(each, dtype=np.float64)) for each in tensors)))


def compare(
    mine: tuple[Losses, Tensors], other: tuple[Losses, Tensors], start: Tensors
) -> tuple[float, float, float]:
    """Return the differences of losses, of adapters, and of adapters relative to the training."""
    assert mine[1].keys() == other[1].keys() == start.keys()
    apart = size([mine[1][name] - other[1][name] for name in start])
    moved = size([other[1][name] - start[name] for name in start])
    losses = [abs(a - b) / abs(b) for a, b in zip(mine[0], other[0], strict=True)]
    return max(losses), apart / size([*other[1].values()]), apart / moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--trl", help="python of an environment with TRL")
    parser.add_argument("--backend", action="append", help="default: cpu")
    parser.add_argument("--model", help="default: a tiny Llama, made here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--words", type=int, default=12, help="most words of an answer")
    parser.add_argument("--plain", action="store_true", help="no chat template in any case")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), given)


def run(scratch: Path, given: argparse.Namespace) -> int:
    names, backends = given.cases or [*CASES], given.backend or ["cpu"]
    base = (
        models.resolve(given.model).path
        if given.model
        else make_model("llama", scratch / "llama", away=True)
    )
    templateless = given.plain or "orpo" in names
    plain = without_template(base, scratch / "plain") if templateless else base
    plans: dict[str, RunPlan] = {}
    found: dict[str, dict[str, tuple[Losses, Tensors]]] = {}
    start: Tensors = {}
    for name in names:
        case = CASES[name]
        rows = write_rows(scratch / f"{name}.jsonl", case, given.words)
        for backend in backends:
            out = scratch / f"{name}-{backend}"
            used = plain if given.plain or case.objective == "orpo" else base
            asked = settings(case, used, rows, backend, given.steps, given.lr, out)
            if name not in plans:
                plans[name] = plan_run(asked)
                start = write_start(plans[name], scratch / "start")
            train(asked)
            found.setdefault(backend, {})[name] = results(out)
    if given.trl:
        found = {"trl": train_with_trl(given.trl, scratch, plans, given.lr), **found}
    return report(names, found, start)


def report(
    names: Sequence[str],
    found: Mapping[str, Mapping[str, tuple[Losses, Tensors]]],
    start: Tensors,
) -> int:
    header = f"{'first loss':>10} {'last':>10} {'loss':>8} {'adapter':>8} {'training':>8}"
    print(f"{'largest difference':<32} {header}")
    faults = 0
    for name, (other, mine) in itertools.product(names, itertools.combinations(found, 2)):
        losses, _ = found[mine][name]
        loss, adapter, training = compare(found[mine][name], found[other][name], start)
        faults += not (loss <= LOSS and adapter <= ADAPTER)
        print(
            f"{name + ', ' + mine + ' to ' + other:<32} {losses[0]:10.6f} {losses[-1]:10.6f} "
            f"{loss:8.1e} {adapter:8.1e} {training:8.1e}"
        )
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
