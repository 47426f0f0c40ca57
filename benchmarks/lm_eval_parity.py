"""vox's model and lm-eval's own `hf` on the same tasks: log-likelihoods, scores and time.

    python benchmarks/lm_eval_parity.py [--rows 1000] [--backends cpu mlx] [--tasks choice text]

In an environment with vox, torch and lm-eval. The rows are made here, `--rows` of each task:
choices with four ends of several tokens, likelihoods, and short generated texts. Both run in
float32, in one process, in turns: a part of the rows by each. What holds so far is printed after
each part. Seconds are processor time within the model, which other processes change little; with
OMP_NUM_THREADS=1 no thread waits for another. lm-eval has its default batch size, 1.

In float32, `hf` adds the softmax up with a bias: 6e-5 for SmolLM2's vocabulary over 5 tokens, which
is most of the difference. `--softmax-dtype float64` is an argument of `hf` itself against that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np

WORDS = [
    "river",
    "piano",
    "teacher",
    "engine",
    "garden",
    "doctor",
    "bridge",
    "kitchen",
    "market",
    "forest",
    "planet",
    "soldier",
]
PARTS = 20
YAML = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: {target}
output_type: {kind}
{more}
"""
TASKS = {
    "choice": (
        "answer",
        "multiple_choice",
        "doc_to_choice: choices\nmetric_list: [{metric: acc}, {metric: acc_norm}]",
    ),
    "likelihood": ('" {{right}}"', "loglikelihood", "metric_list: [{metric: acc}]"),
    "text": (
        '"{{right}}"',
        "generate_until",
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]",
    ),
}


def rows(count: int) -> list[dict[str, Any]]:
    rng, made = random.Random(0), []
    for _ in range(count):
        a, b = rng.randrange(2, 60), rng.randrange(2, 60)
        one, other = rng.sample(WORDS, 2)
        found = [a + b, a + b + rng.randrange(1, 9), a + b - rng.randrange(1, 9), a + b + 10]
        rng.shuffle(found)
        question = f"A {one} has {a} of them and a {other} has {b}. How many are there together?"
        choices = [f"{number} of them" for number in found]
        at = found.index(a + b)
        made.append({"question": question, "choices": choices, "answer": at, "right": choices[at]})
    return made


def tasks_of(names: list[str], count: int, folder: Path) -> Iterator[tuple[str, Any]]:
    """Parts of the tasks, so that two models can take turns."""
    from lm_eval.tasks import TaskManager

    every = rows(count)
    for name in names:
        for part in range(PARTS):
            data = folder / f"{name}-{part}.jsonl"
            data.write_text("\n".join(map(json.dumps, every[part::PARTS])))
            target, kind, more = TASKS[name]
            file = folder / f"{name}_{part}.yaml"
            file.write_text(
                YAML.format(name=file.stem, data=data, target=target, kind=kind, more=more)
            )
    manager = TaskManager(include_path=[str(folder)], include_defaults=False)
    for part in range(PARTS):
        for name in names:
            yield name, manager.load([f"{name}_{part}"])["tasks"][f"{name}_{part}"]


def evaluated(model: Any, task: Any) -> tuple[float, list[dict[str, Any]], dict[str, float]]:
    """Return the seconds of processor time within the model, samples and figures: lm-eval's own
    work is the same for each part and model."""
    from lm_eval import simple_evaluate

    seconds = 0.0

    def timed(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        began = time.process_time()
        answers = compute(*args, **kwargs)
        seconds += time.process_time() - began
        return answers

    for name in ("loglikelihood", "generate_until"):
        setattr(model, name, partial(timed, getattr(type(model), name), model))
    found = simple_evaluate(model=model, tasks=[task], bootstrap_iters=10)
    (samples,), (figures,) = found["samples"].values(), found["results"].values()
    return (
        seconds,
        samples,
        {k: v for k, v in figures.items() if k.startswith(("acc,", "acc_norm,"))},
    )


def answers(samples: list[dict[str, Any]]) -> list[Any]:
    return [each[0] for sample in samples for each in sample["resps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backends", nargs="+", default=["cpu"])
    parser.add_argument("--tasks", nargs="+", default=["choice", "likelihood"])
    parser.add_argument("--softmax-dtype", choices=["float32", "float64"])
    given = parser.parse_args()

    from contextlib import ExitStack

    import lm_eval.models.huggingface as hf

    from vox_core.api.generating import GenerateSettings, open_model
    from vox_core.api.models import resolve_reference
    from vox_scorers.lm_eval_model import VoxModel

    path = resolve_reference(given.model).base.path
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        models: dict[str, Any] = {
            "hf": hf.HFLM(
                pretrained=str(path),
                dtype="float32",
                softmax_dtype=given.softmax_dtype,
                device="cpu",
                batch_size=1,
            )
        }
        for backend in given.backends:
            opened = stack.enter_context(
                open_model(given.model, GenerateSettings(backend=backend, dtype="fp32"))
            )
            file = Path(scratch, f"{backend}.jsonl")
            greedy = frozenset(f"likelihood_{part}" for part in range(PARTS))
            models[backend] = VoxModel(opened, file, greedy, lambda _: None)
        seconds = {(name, model): 0.0 for name in given.tasks for model in models}
        worst = dict.fromkeys(seconds, 0.0)
        differ, figures_differ = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0)
        rows_done = dict.fromkeys(given.tasks, 0)
        for name, task in tasks_of(given.tasks, given.rows, Path(scratch)):
            theirs, their_figures = None, None
            for model, lm in models.items():
                took, samples, figures = evaluated(lm, task)
                seconds[name, model] += took
                own = answers(samples)
                if theirs is None:
                    theirs, their_figures = own, figures
                elif name == "text":
                    differ[name, model] += sum(a != b for a, b in zip(own, theirs, strict=True))
                else:
                    a, b = (np.array([each[0] for each in some]) for some in (own, theirs))
                    worst[name, model] = max(worst[name, model], float(np.abs(a - b).max()))
                    figures_differ[name, model] += figures != their_figures
                    if name == "likelihood":
                        differ[name, model] += sum(
                            x[1] != y[1] for x, y in zip(own, theirs, strict=True)
                        )
            rows_done[name] += len(theirs or ()) // (4 if name == "choice" else 1)
            if name != given.tasks[-1]:
                continue
            for (of, model), took in seconds.items():
                print(
                    f"{rows_done[of]:5d} rows  {of:10s} {model:4s} {took:8.1f} s  "
                    f"{seconds[of, 'hf'] / took:5.2f} x  log-likelihoods differ by "
                    f"{worst[of, model]:.2e} at most, answers in {differ[of, model]} rows, "
                    f"accuracies in {figures_differ[of, model]} parts",
                    flush=True,
                )


if __name__ == "__main__":
    main()
