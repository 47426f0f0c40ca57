"""Calls of the Python API as type checkers see them; mypy reads this file, and nobody runs it.

Each comment that ignores an error holds it in place: without the error, the comment is one.
"""

from pathlib import Path

import numpy as np

import vox_core as vox


def right(run: vox.Run, rows: list[dict[str, str]]) -> None:
    again = vox.train(model="smollm2-135m", data=rows, valid=rows, lr=1e-3, max_time="2h", rank=8)
    vox.train(model=run, data=Path("train.jsonl"), targets=["q_proj"], resume=again)
    vox.train(data=Path().glob("*.jsonl"), rank=np.int64(8), lr=np.float32(1e-3), tag={"a", "b"})
    vox.train(data={"a.jsonl", "b.jsonl"}, fields=["prompt=q"], targets=iter(["q_proj"]))
    vox.merge(run, "merged", dtype="fp32")
    with vox.load(run, temperature=0.7, adapter="none") as model:
        answers: list[str] = model.generate(["a", "b"], top_p=0.9)
        answers += model.generate(each for each in ("a", "b"))
        answers += [
            model.chat("a", max_tokens=8),
            *(each.answer for each in model.answers(["a"], n=2)),
        ]
    with vox.open_trainer("smollm2-135m", rank=16) as trainer:
        trainer.optim_step(lr=1e-4)


def wrong(run: vox.Run) -> None:
    vox.train(model="smollm2-135m", learning_rate=1e-3)  # type: ignore[call-arg]
    vox.train(model="smollm2-135m", method="lorra")  # type: ignore[arg-type]
    vox.train(model="smollm2-135m", max_steps=1.5)  # type: ignore[arg-type]
    vox.train(model="smollm2-135m", valid=["a.jsonl"])  # type: ignore[list-item]
    vox.open_trainer("smollm2-135m", epochs=3)  # type: ignore[call-arg]
    vox.merge(run, rank=8)  # type: ignore[call-arg]
    with vox.load(run) as model:
        model.generate("a", dtype="fp32")  # type: ignore[call-overload]
        model.chat("a", n=2)  # type: ignore[call-arg]
