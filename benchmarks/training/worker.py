"""Run a trainer once, in this process.

    python -m benchmarks.training.worker TASK.json ANSWER.json STARTED

STARTED is the monotonic clock when the command was given, so that interpreter, imports and loading
count. `vox train` itself reads text, and no text gives exactly these token ids; so every trainer is
driven from here, from the same ids to a saved adapter.
"""

from __future__ import annotations

import importlib
import resource
import sys
import time
from pathlib import Path

from benchmarks.training.task import Answer, Diary, Task

TRAINERS = {
    "vox": "vox_hooks",
    "vox-mlx": "vox_hooks",
    "trl": "trl_sft",
    "trl-best": "trl_sft",
    "loop": "plain_loop",
    "loop-sorted": "plain_loop",
    "reference": "plain_loop",
    "mlx-lm": "mlx_lm_tuner",
}
"""Name of a trainer -> module in trainers/; the same module may serve several, by their names."""


def main(task_file: str, answer_file: str, started: str) -> None:
    task, diary, zero = Task.read(Path(task_file)), Diary(), float(started)
    Path(task.out).mkdir(parents=True)
    module = importlib.import_module(f"benchmarks.training.trainers.{TRAINERS[task.trainer]}")
    module.train(task, diary)
    saved = time.monotonic() - zero
    marks = [mark - zero for mark in diary.marks]
    peaks = memory(task.device)
    answer = Answer(
        losses=diary.losses,
        marks=marks,
        saved=saved,
        moved=moved(task),
        memory=peaks,
        attention=diary.attention,
        layout=diary.layout,
    )
    answer.write(Path(answer_file))


def moved(task: Task) -> float:
    """The norm of all B of the adapter that was saved, in PEFT's layout or in mlx-lm's; with the
    method `full`, of what the weights changed by."""
    import numpy as np

    from vox_core.weights import SafetensorsFile, WeightFolder

    if task.method == "full":
        before, after = WeightFolder(Path(task.model)), WeightFolder(Path(task.out))
        changes = (
            after.read(name).astype(np.float64) - before.read(name) for name in before.tensors
        )
        return float(np.sqrt(sum(np.square(change).sum() for change in changes)))
    file = SafetensorsFile(next(Path(task.out).glob("adapter*.safetensors")))
    parts = [
        file.read(name).astype(np.float64) for name in file.tensors if "lora_b" in name.lower()
    ]
    return float(np.sqrt(sum(np.square(part).sum() for part in parts)))


def memory(device: str) -> dict[str, int]:
    """Peaks of this process, in bytes."""
    peaks = {"rss": peak_rss()}
    if device == "cuda":
        import torch

        peaks["allocated"] = torch.cuda.max_memory_allocated()
        peaks["reserved"] = torch.cuda.max_memory_reserved()
    return peaks


def peak_rss() -> int:
    """Peak resident memory in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage would count what the parent held when it made this process.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    main(*sys.argv[1:])
