"""Micro-batches of a step by tokens (best fit) and by padded positions: how many, and how long.

    python benchmarks/packing.py [--model smollm2-135m] [--steps 0] [--dtype bf16]

Lengths are those of `training/documents.py` (`chat`, `mixed`) and of conversations made of texts of
`vox quickstart`, 4 characters taken as a token. Counted are the micro-batches of 200 steps. With
`--steps N` the cpu backend takes N steps each way instead, in one process, one way after the other
on the same documents; printed is the ratio of each pair of steps, its median, and how far apart the
losses are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tokenising import conversations
from benchmarks.training.documents import Data, make_steps
from vox_core.contract import Packing, Step, StepDone, TrainJob, TrainState, probe_document
from vox_core.data.batching import cut, grouped

WAYS: tuple[Packing, Packing] = ("rows", "end-to-end")
STEPS = 200


def lengths(data: str, per_step: int) -> list[list[int]]:
    """Tokens of the documents of each step."""
    if data != "conversations":
        shape: Data = "chat" if data == "chat" else "mixed"
        return [[len(d) for d in step] for step in make_steps(shape, 512, STEPS, per_step)]
    rows = conversations(STEPS * per_step, varied=False)
    found = [sum(len(m["content"]) for m in row["messages"]) // 4 + 8 for row in rows]
    return [found[at : at + per_step] for at in range(0, len(found), per_step)]


def counts() -> None:
    """A line for each kind of data, size of a step and budget."""
    for data in ("chat", "mixed", "conversations"):
        for per_step in (8, 32, 128):
            steps = lengths(data, per_step)
            for budget in (2048, 8192):
                rows, packs = (
                    sum(len(grouped(step, budget, way)) for step in steps) / STEPS for way in WAYS
                )
                least = sum(-(-sum(step) // budget) for step in steps) / STEPS
                told = {"data": data, "documents": per_step, "tokens at once": budget}
                told |= {"rows": rows, "end to end": packs, "at least": least}
                print(json.dumps({**told, "ratio": round(packs / rows, 3)}), flush=True)


def times(data: Data, model: str, steps: int, dtype: str, per_step: int, budget: int) -> None:
    """Steps of both ways in turn."""
    from vox_core.config import TrainSettings, validate
    from vox_core.host.load import Context
    from vox_core.run.hf_checkpoint import seeded
    from vox_core.run.learner import Learner
    from vox_core.run.run_plan import plan_run

    folder = Path(tempfile.mkdtemp())
    some = make_steps(data, 40_000, steps, per_step)
    (folder / "train.jsonl").write_text('{"text": "a row that says something"}\n')
    given = {"model": model, "data": folder, "dtype": dtype, "backend": "cpu", "tune": "ignore"}
    given |= {"micro_batch_tokens": budget, "allow_cpu": True, "schedule": "constant"}
    planned = plan_run(validate(TrainSettings, given), only_planned=True)
    execution, contract = planned.execution, planned.contract
    taken: list[tuple[Packing, int]] = []
    pairs: list[Step] = []
    for index, chosen in enumerate(some):
        for way in WAYS if index % 2 else WAYS[::-1]:
            batches, weight = cut(chosen, budget, way)
            taken.append((way, len(batches)))
            pairs.append(Step(len(taken), batches, weight, lr=0.0))
    start = TrainState(0, seeded(execution, planned.inputs.weights))
    job = TrainJob(execution, planned.inputs.model.path, probe_document(pairs[0].batches))
    done: list[StepDone] = []
    with closing(planned.inputs.backend.train(job, Context())) as trainer:
        learner = Learner(trainer, start, contract.optimizer, contract.seed)
        for step in pairs:
            event = learner.take(step)
            if not isinstance(event, StepDone):
                sys.exit(f"a step is not finite: {event}")
            done.append(event)
    ratios, apart = [], []
    for at in range(2, len(done), 2):  # the first pair warms up
        pair = dict(zip((way for way, _ in taken[at : at + 2]), done[at : at + 2], strict=True))
        rows, packs = pair["rows"], pair["end-to-end"]
        ratios.append(packs.seconds / rows.seconds)
        apart.append(abs(packs.loss / rows.loss - 1))
    print(
        json.dumps(
            {
                "model": model,
                "data": data,
                "dtype": dtype,
                "documents": per_step,
                "tokens at once": budget,
                "micro-batches": {w: sum(n for way, n in taken if way == w) for w in WAYS},
                "seconds, ratio": [round(ratio, 3) for ratio in ratios],
                "median": round(statistics.median(ratios), 3),
                "losses apart": max(apart),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--data", choices=["chat", "mixed"], default="mixed")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    if asked.steps:
        times(asked.data, asked.model, asked.steps, asked.dtype, asked.documents, asked.tokens)
    else:
        counts()


if __name__ == "__main__":
    main()
