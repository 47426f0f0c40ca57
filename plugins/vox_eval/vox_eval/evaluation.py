"""Evaluate a model on a suite, into a folder that the same command continues.

    evaluation.json   everything that decides the scores, and its digest; written first
    eval.jsonl        a line for each example, in the order of the suite
    scorecard.json    written at the end (scorecard.py)
    scorecard.html    the samples for a reader (page.py)

Examples are computed in blocks of `BLOCK`, and a block's lines are appended together. A continued
evaluation computes whole blocks again, so the rows that share a batch, and with them the roundoff
of every log-probability, are those of an uninterrupted one: the files are the same byte for byte.

Shape legend: T tokens of a batch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import groupby, islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vox_core.api.commands import duration, kept_if_stopped, named
from vox_core.api.files import append, storage_errors, write_json
from vox_core.api.generating import GenerateSettings, OpenModel, Question, open_model, prompt_text
from vox_core.api.host import foreign_errors
from vox_core.api.models import Observe, Progress, resolve_reference
from vox_core.api.runs import Results, continued
from vox_core.contract import Batch, Notice, padded_groups
from vox_core.errors import DataError, PluginError, TrainingError
from vox_eval.page import write_page
from vox_eval.scorecard import (
    EVALUATION,
    SAMPLES,
    SCORECARD,
    Scorecard,
    TaskComparison,
    compare,
    read_scorecard,
    scorecard,
    source_of,
    visible,
)
from vox_eval.scorer import Example, Output, Score
from vox_eval.settings import EvalSettings
from vox_eval.suites import Suite, Task, json_digest, read_suites

if TYPE_CHECKING:
    from numpy.typing import NDArray

Stop: TypeAlias = Callable[[], bool]
FORMAT = 1
AGAINST = "against"
"""Folder of the other model within `--out`."""
BLOCK = 64
"""Examples whose lines are written together."""
BATCH_TOKENS = 2048
"""Tokens of a batch of log-probabilities, padding included."""
WINDOW = 2048
"""Tokens of a text that are computed together, if the model reads as many."""
PROGRESS_LINES = 20
EVALUATIONS = Results(EVALUATION, "evaluation", "suite, model, backend and versions")
_SPEAKERS = "assistant", "user"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The folder of an evaluation, its scorecard, and the model's name for display."""

    folder: Path
    card: Scorecard
    name: str


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation, and its comparison with another; None without one."""

    own: Evaluated
    other: Evaluated | None = None
    comparison: Mapping[str, TaskComparison] | None = None


class Stopped(Exception):
    """The evaluation was stopped on the way."""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens, of which the log-probabilities from index `first` on are wanted."""

    tokens: Sequence[int]
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An example as tokens: a question, or documents.

    Args:
        at: index in its task.
    """

    task: Task
    at: int
    asked: Question | list[Document]

    @property
    def example(self) -> Example:
        """The example itself."""
        return self.task.examples[self.at]


def evaluate_and_compare(
    reference: str, settings: EvalSettings, *, observe: Observe, progress: Progress | None = None
) -> Report:
    """Evaluate what `reference` names, and compare it with `settings.against`: the folder of an
    earlier evaluation, or a model, which is evaluated, too.

    Raises:
        InputError: a fault of suites, rows, models or folders, before anything is computed with
            the model that has it.
        WorkError: computing failed; the same call continues.
    """
    suite, against = read_suites(settings.suite, settings.limit, reference), settings.against
    other = None
    if against and (Path(against) / EVALUATION).is_file():
        other = Evaluated(Path(against), read_scorecard(Path(against), suite), against)
    elif against:  # before the first model is evaluated
        resolve_reference(against, progress=progress)
    for line in visible(suite) if against else ():
        observe(Notice(line))
    chosen = GenerateSettings(backend=settings.backend, dtype=settings.dtype)
    evaluated = partial(evaluate, suite=suite, settings=chosen, observe=observe, progress=progress)
    own = evaluated(reference, out=settings.out)
    if not against:
        return Report(own)
    other = other or evaluated(against, out=settings.out and settings.out / AGAINST)
    write_page(own.folder, other.folder, names=(own.name, other.name))
    return Report(own, other, compare(own.card, other.card))


def evaluate(
    reference: str,
    *,
    suite: Suite,
    settings: GenerateSettings,
    out: Path | None,
    observe: Observe,
    progress: Progress | None = None,
) -> Evaluated:
    """Evaluate what `reference` names.

    Args:
        out: folder; None: `evals/SUITE-MODEL-DIGEST`.

    Raises:
        InputError: the model cannot be used, an example does not fit into it, or `out` has another
            evaluation; nothing was computed.
        WorkError: computing failed; `out` keeps the examples before.
    """
    if out:
        EVALUATIONS.require_same(out, _without_model(suite))
    with open_model(reference, settings, observe=observe, progress=progress) as model:
        decides = decided_by(model, suite)
        folder = out or default_folder(suite, reference, decides["digest"])
        name = named(reference, model.title)
        return evaluate_opened(model, suite, decides, folder, observe, name=name)


def evaluate_opened(
    model: OpenModel,
    suite: Suite,
    decides: Mapping[str, Any],
    folder: Path,
    observe: Observe,
    stop: Stop = lambda: False,
    name: str = "",
) -> Evaluated:
    """Evaluate a model that is open.

    Args:
        decides: as `decided_by` returns it.
        stop: called after each example.
        name: of the model, for display; empty: its title.

    Raises:
        Stopped: `stop` said so; `folder` keeps the blocks before.
        InputError, WorkError: as `evaluate`.
    """
    prepared = [
        _prepared(model, task, at) for task in suite.tasks for at in range(len(task.examples))
    ]
    name = name or model.title
    with computed_in(folder, decides, name, observe):
        lines = _run(model, prepared, folder / SAMPLES, observe, stop)
        with storage_errors(folder):
            samples = (folder / SAMPLES).read_bytes()
        card = scorecard(suite, lines, samples, digest=decides["digest"], model=model.title)
        write_json(folder / SCORECARD, card.to_json())
        write_page(folder, names=(name,))
    return Evaluated(folder, card, name)


def default_folder(suite: Suite, reference: str, digest: str) -> Path:
    """Return `evals/SUITE-MODEL-DIGEST`, or the same evaluation under another name of the model."""
    name = re.sub(r"[^\w.-]+", "-", reference.rstrip("/").rpartition("/")[2]).strip("-.")
    own = Path("evals") / f"{suite.name}-{name or 'model'}-{digest[:8]}"
    there = sorted(own.parent.glob(f"{suite.name}-*-{digest[:8]}"))
    return own if own in there else next(iter(there), own)


def decided_by(model: OpenModel, suite: Suite) -> dict[str, Any]:
    """Return everything that decides the samples and their scores, with its digest."""
    computed = {"identity": model.identity(), **model.computed_by}
    decides = {**_without_model(suite), "model": computed}
    return {"digest": json_digest(decides), **decides}


def _without_model(suite: Suite) -> dict[str, Any]:
    return {
        "suite": {
            "name": suite.name,
            "digest": suite.digest,
            "tasks": {task.id: task.to_json() for task in suite.tasks},
        },
        "version": version("vox-ml-eval"),
        "batches": [BLOCK, BATCH_TOKENS, WINDOW],
    }


# --- the folder -----------------------------------------------------------------------------------


@contextmanager
def computed_in(
    folder: Path, decides: Mapping[str, Any], model: str, observe: Observe
) -> Iterator[None]:
    """Hold the folder of an evaluation while it is computed.

    Args:
        decides: everything that decides the samples and their scores.

    Raises:
        OutputError: O001, it has something else; O003, another process works in it.
    """
    with EVALUATIONS.held(folder, {"format": FORMAT, **decides}):
        observe(Notice(f"evaluating {model} into {folder}"))
        yield


def _kept(path: Path, prepared: Sequence[Prepared]) -> list[dict[str, Any]]:
    """Return the lines of whole blocks in `path`, and drop what follows them."""

    def parse(whole: list[bytes]) -> list[dict[str, Any]]:
        try:
            lines = [json.loads(line) for line in whole]
            names = [(line["task"], line["row"]) for line in lines]
            scores = [(float(line["score"]), float(line["weight"])) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            found = f"lines of {SAMPLES} that cannot be read: {error}"
            raise EVALUATIONS.others(path.parent, found) from error
        if names != [(each.task.id, each.example.id) for each in prepared[: len(names)]]:
            raise EVALUATIONS.others(path.parent, f"a {SAMPLES} with other examples")
        for each, score in zip(prepared, scores, strict=False):
            if not _is_score(each.task, *score):
                found = f"task {each.task.id}: scores that its scorer does not give now"
                raise EVALUATIONS.others(path.parent, found)
        return lines

    return continued(path, parse, block=BLOCK, total=len(prepared))


def _run(
    model: OpenModel, prepared: Sequence[Prepared], path: Path, observe: Observe, stop: Stop
) -> list[dict[str, Any]]:
    """Compute what `path` lacks; return all lines."""
    lines = _kept(path, prepared)
    progress = _Progress(len(lines), len(prepared), observe, stop)
    for start in range(len(lines), len(prepared), BLOCK):
        block = prepared[start : start + BLOCK]
        with kept_if_stopped(f"{start}/{len(prepared)} examples are kept in {path.parent}"):
            new = [*map(_line, block, *_scored(model, block, progress))]
        append(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in new).encode())
        lines += new
    return lines


class _Progress:
    """Notices of how many examples are done, and of the time left; about twenty."""

    def __init__(self, start: int, total: int, observe: Observe, stop: Stop) -> None:
        self._start = self._done = start
        self._total, self._observe, self._stop = total, observe, stop
        self._every = max(1, -(-(total - start) // PROGRESS_LINES))
        self._began = time.perf_counter()
        if start:
            observe(Notice(f"{start}/{total} examples are there from an earlier call"))

    def add(self) -> None:
        """Count an example; raise `Stopped` if the evaluation is to stop."""
        if self._stop():
            raise Stopped
        self._done += 1
        new = self._done - self._start
        if new % self._every == 0 or self._done == self._total:
            left = (time.perf_counter() - self._began) / new * (self._total - self._done)
            self._observe(Notice(f"{self._done}/{self._total} examples, {duration(left)} left"))


def _line(prepared: Prepared, output: Output, score: Score) -> dict[str, Any]:
    """Return an example's line of eval.jsonl."""
    task, example = prepared.task, prepared.example
    return {
        "task": task.id,
        "row": example.id,
        "prompt": example.text or [dict(message) for message in example.messages],
        **({"turns": output.turns} if output.turns else {}),
        "answer": output.text if score.answer is None else score.answer,
        # The shortest decimals that are the same float32.
        "log_probs": [[float(str(value)) for value in each] for each in output.log_probs],
        "score": score.value,
        "weight": score.weight,
        "why": score.why,
        **({"source": source} if (source := source_of(example.fields)) else {}),
    }


def _score(prepared: Prepared, output: Output) -> Score:
    task, example = prepared.task, prepared.example
    where = f"task {task.id}, row {example.id}"
    if not all(np.isfinite(each).all() for each in output.log_probs):
        raise TrainingError(
            "T004",
            "an answer cannot be judged: its log-probabilities are not finite",
            where=where,
            remedy="evaluate with --dtype fp32; if that changes nothing, the weights are broken",
        )
    with foreign_errors(task.table.scorer.name, f"score, at {where}", "scorer"):
        score: object = task.scorer.score(example, output)
        if not isinstance(score, Score):
            raise TypeError(f"it returned a {type(score).__name__}, expected Score")
    _require_score(task, where, score)
    return score


def _is_score(task: Task, value: float, weight: float) -> bool:
    if task.scorer.binary:
        return value in (0, 1) and weight == 1
    return bool(np.isfinite(value)) and 0 < weight < np.inf


def _require_score(task: Task, where: str, score: Score) -> None:
    if _is_score(task, score.value, score.weight):
        return
    raise PluginError(
        "X001",
        f"scorer {task.table.scorer.name!r} gave a wrong score",
        where=where,
        found=f"score {score.value}, weight {score.weight}",
        expected="0 or 1 with weight 1; for others its class has `binary = False`"
        if task.scorer.binary
        else "a finite score with a positive weight",
        remedy="correct the scorer, or report it to its authors",
    )


# --- tokens ---------------------------------------------------------------------------------------


def _prepared(model: OpenModel, task: Task, at: int) -> Prepared:
    """Return an example as tokens.

    Raises:
        DataError: D005, the chat template refuses it; D007, it is too long.
    """
    example = task.examples[at]
    try:
        if task.scorer.asks == "answer":
            return Prepared(task, at, model.question(example.messages, at, task.settings()))
        if task.scorer.asks in ("choices", "ideal"):
            return Prepared(task, at, _ends(model, example))
        return Prepared(task, at, _windows(model, example.text))
    except DataError as error:
        place = f"task {task.id!r}, example {at + 1} of {task.table.rows}"
        raise error.but(where=place) from error


def _ends(model: OpenModel, example: Example) -> list[Document]:
    """Return prompt and choice, tokenised together, for each choice.

    Scored are the tokens from the first in which any choice differs from the prompt's own: a
    tokenizer may join the end of a prompt, such as a blank, with some choices (Biderman et al.
    2024, "Lessons from the Trenches on Reproducible Evaluation of Language Models",
    arXiv:2405.14782).
    """
    ends = example.choices or example.ideal[:1]
    prompt, special = prompt_text(model.tokenizer, example.messages)
    before = _tokens(model, prompt, special)
    whole = [_tokens(model, prompt + choice, special) for choice in ends]
    # At least the last: of a choice that disappears within a token of the prompt.
    first = min(min(_common(before, tokens), len(tokens) - 1) for tokens in whole)
    return [_fitting(model, Document(*_with_start(model, tokens, first))) for tokens in whole]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with together."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(a), len(b)))


def _windows(model: OpenModel, text: str) -> list[Document]:
    """Return a text in windows that the model can read, each token scored once.

    The first token follows the tokenizer's BOS token, or its EOS token; each further window begins
    with the last token of the one before.
    """
    tokens, first = _with_start(model, _tokens(model, text, True), 0)
    if first >= len(tokens):
        raise DataError(
            "D003",
            "a text of a single token has no likelihood",
            found=f"{text[:80]!r}, and a tokenizer without BOS and EOS token",
            remedy="take the row out",
        )
    most = min(WINDOW, model.positions or WINDOW) - 1
    starts = range(first, len(tokens), most)
    return [Document(tokens[start - 1 : start + most], 1) for start in starts]


def _tokens(model: OpenModel, text: str, special: bool) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _with_start(model: OpenModel, tokens: list[int], first: int) -> tuple[list[int], int]:
    """Return tokens with one before the first that is scored."""
    tokenizer = model.tokenizer
    if first > 0:
        return tokens, first
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None or tokens[:1] == [start]:
        return tokens, 1
    return [start, *tokens], 1


def _fitting(model: OpenModel, document: Document) -> Document:
    if model.positions is None or len(document.tokens) <= model.positions:
        return document
    raise DataError(
        "D007",
        "an example is longer than the model can read",
        found=f"{len(document.tokens)} tokens",
        expected=f"at most {model.positions}",
        remedy="shorten the row, or take it out",
    )


# --- the model ------------------------------------------------------------------------------------


def _scored(
    model: OpenModel, block: Sequence[Prepared], progress: _Progress
) -> tuple[list[Output], list[Score]]:
    """Return what the model gives for each example of a block, after as many turns as the scorers
    take, and the scores."""
    outputs = _outputs(model, block, progress)
    scores = _scores(block, outputs)
    open_ = [i for i, each in enumerate(block) if isinstance(each.asked, Question)]
    while open_:
        again = {i: _again(model, block[i], outputs[i], scores[i]) for i in open_}
        asked = {i: found for i, found in again.items() if found}
        open_ = list(asked)
        for at, reply in model.replies([asked[i][0] for i in open_], log_probs=True):
            i = open_[at]
            log_probs = [np.asarray(reply.log_probs, np.float32)]
            outputs[i] = Output(reply.text, log_probs, asked[i][1])
        new = _scores([block[i] for i in open_], [outputs[i] for i in open_])
        for i, score in zip(open_, new, strict=True):
            scores[i] = score
    return outputs, scores


def _again(
    model: OpenModel, prepared: Prepared, output: Output, score: Score
) -> tuple[Question, tuple[str, ...]] | None:
    """Return the scorer's next question, with the turns before its answer; None if it has none, or
    the model cannot read as much."""
    task = prepared.task
    with foreign_errors(task.table.scorer.name, "again", "scorer"):
        said = task.scorer.again(prepared.example, output, score)
    if said is None:
        return None
    turns = (*output.turns, output.text, said)
    since = [{"role": _SPEAKERS[at % 2], "content": turn} for at, turn in enumerate(turns)]
    messages = [*prepared.example.messages, *since]
    try:
        return model.question(messages, prepared.at, task.settings()), turns
    except DataError as error:
        if error.code != "VOX-D007":
            raise
        return None


def _scores(block: Sequence[Prepared], outputs: Sequence[Output]) -> list[Score]:
    scores = list[Score]()
    pairs = zip(block, outputs, strict=True)
    for parallel, group in groupby(pairs, key=lambda pair: pair[0].task.scorer.parallel):
        if parallel == 1:
            scores += starmap(_score, group)
            continue
        pool = ThreadPoolExecutor(parallel)
        try:
            scores += pool.map(_score, *zip(*group, strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
    return scores


def _outputs(model: OpenModel, block: Sequence[Prepared], progress: _Progress) -> list[Output]:
    """Return what the model gives for each example of a block."""
    found: dict[int, Output] = {}
    asked = {i: each.asked for i, each in enumerate(block) if isinstance(each.asked, Question)}
    numbers = list(asked)
    for at, reply in model.replies(list(asked.values()), log_probs=True):
        found[numbers[at]] = Output(reply.text, [np.asarray(reply.log_probs, np.float32)])
        progress.add()
    documents = {i: each.asked for i, each in enumerate(block) if isinstance(each.asked, list)}
    scored = iter(log_probs(model, [one for each in documents.values() for one in each]))
    for i, each in documents.items():
        found[i] = Output("", list(islice(scored, len(each))))
        progress.add()
    return [found[i] for i in range(len(block))]


def log_probs(model: OpenModel, documents: Sequence[Document]) -> list[NDArray[np.float32]]:
    """Return the log-probabilities that each document wants, in order."""
    found: dict[int, NDArray[np.float32]] = {}
    # Choices after one prompt are neighbours, since a backend may compute their prompt once.
    prompts = [tuple(each.tokens[: each.first if each.first > 1 else None]) for each in documents]
    lengths = [len(each.tokens) - 1 for each in documents]
    longest = dict(sorted(zip(prompts, lengths, strict=True)))
    for group in padded_groups([longest[prompt] for prompt in prompts], BATCH_TOKENS):
        batch = _batch([documents[index] for index in group])
        log_probs_T = model.log_probs(batch)
        for index, extent in zip(group, batch.documents(), strict=True):
            found[index] = log_probs_T[extent][batch.scored_T[extent]].astype(np.float32)
    return [found[index] for index in range(len(documents))]


def _batch(documents: Sequence[Document]) -> Batch:
    """Return a batch of documents without their last tokens, which are targets only."""
    starts_D = np.cumsum([0, *(len(each.tokens) - 1 for each in documents[:-1])], dtype=np.int64)
    tokens_T = np.concatenate([each.tokens[:-1] for each in documents]).astype(np.int64)
    targets_T = np.concatenate([each.tokens[1:] for each in documents]).astype(np.int64)
    scored_T = np.concatenate([np.arange(1, len(each.tokens)) >= each.first for each in documents])
    return Batch(tokens_T, targets_T, np.zeros(len(tokens_T), np.float32), starts_D, scored_T)
