"""Generate rows for training with a teacher: `vox data generate`.

    generation.json    everything that decides the rows; written first
    answers.jsonl      a line for each prompt: answer, checks, rating; where a killed run goes on
    train.jsonl        the rows that are kept, as `vox train` reads them, with their provenance
    rejected.jsonl     the others, each with why
    report.json        how many of each

Prompts are answered in blocks of `BLOCK`, and a block's lines are appended together; a block that
is not whole is computed again, so that a run that was killed ends with the bytes of one that was
not.

Checks and ratings are scorers of `vox eval`, and a teacher at an address is another package's:
entry points of the groups `vox_data.scorers` and `vox_data.teachers`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from vox_core.api.commands import kept_if_stopped, named
from vox_core.api.files import append, write_bytes, write_json
from vox_core.api.generating import GenerateSettings, open_model
from vox_core.api.models import Observe, Progress
from vox_core.api.runs import Results, continued
from vox_core.contract import Notice
from vox_core.errors import BackendError, ConfigError
from vox_data.generate_recipe import FILLED, GenerateRecipe, read_recipe, seed_rows
from vox_data.near_duplicates import near_duplicates

GENERATION, ANSWERS = "generation.json", "answers.jsonl"
TRAIN, REJECTED, REPORT = "train.jsonl", "rejected.jsonl", "report.json"
GENERATIONS = Results(GENERATION, "generation", "recipe, seed rows, teacher and versions")
BLOCK = 32
AT_ONCE = 8
"""Requests to an address, and scorers, at once."""

Row: TypeAlias = "Mapping[str, Any]"
Messages: TypeAlias = "list[dict[str, str]]"
Answers: TypeAlias = "Callable[[Sequence[Messages], int], list[tuple[str, str]]]"
"""Conversations, and the number of the first -> text and `finish_reason` of each answer."""
CUT_OFF = "length"
"""`finish_reason` of an answer that has reached `max-tokens`."""


class Judge(Protocol):
    """A scorer, as the plugin `scorers` gives it."""

    identity: Mapping[str, Any]

    def check(self, row: Row) -> None:
        """Refuse a prompt that cannot be judged."""
        ...

    def __call__(self, row: Row, answer: str) -> tuple[float, str]:
        """Return the score of an answer, and why."""
        ...


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished generation.

    Args:
        kept: rows of train.jsonl.
        rejected: how many rows went, by the reason.
    """

    folder: Path
    prompts: int
    kept: int
    rejected: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Teacher:
    """Who answers, and what identifies the answers."""

    title: str
    identity: Mapping[str, Any]
    answers: Answers


def generate(
    teacher: str,
    recipe_file: Path,
    out: Path,
    *,
    backend: str | None = None,
    dtype: Any = "auto",
    observe: Observe,
    progress: Progress | None = None,
) -> Generated:
    """Generate rows by a recipe into a folder, or go on there.

    Args:
        teacher: a run, a model, or an address with OpenAI's chat completions.

    Raises:
        InputError: a fault of recipe, seed rows, teacher or folder, before any work.
        WorkError: computing failed; the same call goes on.
    """
    recipe = read_recipe(recipe_file)
    prompts = prompts_of(recipe, seed_rows(recipe, recipe_file))
    checks = [(each.scorer["name"], _scorer(each.scorer, recipe_file)) for each in recipe.check]
    rating = _scorer(recipe.rating.scorer, recipe_file) if recipe.rating else None
    judges = [judge for _, judge in checks] + ([rating] if rating else [])
    for judge, row in itertools.product(judges, prompts):
        judge.check(row)
    settings = GenerateSettings(backend=backend, dtype=dtype, **recipe.sampling.model_dump())
    known = {
        "recipe": recipe.model_dump(mode="json"),
        "prompts": _digest(prompts),
        "scorers": [judge.identity for judge in judges],
        "version": version("vox-ml-data"),
        "block": BLOCK,
    }
    GENERATIONS.require_same(out, known)
    with _opened(teacher, recipe, settings, observe, progress) as opened:
        decides = {**known, "teacher": opened.identity}
        digest = _digest(decides)
        with GENERATIONS.held(out, {"digest": digest, **decides}):
            observe(Notice(f"{len(prompts)} prompts for {opened.title} into {out}"))
            judged = partial(_judged, checks=checks, rating=rating)
            lines = _lines(out / ANSWERS, prompts, recipe, opened, judged, observe)
            return _finished(out, recipe, lines, opened.title, digest)


def prompts_of(recipe: GenerateRecipe, seeds: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the fields of each prompt with its text: every template with every seed row and every
    combination of values, in an order that the recipe's seed decides."""
    names = list(recipe.values)
    combinations = [
        dict(zip(names, c, strict=True)) for c in itertools.product(*recipe.values.values())
    ]
    found = []
    for template, row, values in itertools.product(recipe.template, seeds, combinations):
        fields = {**row, **values}
        text = FILLED.sub(lambda match: str(fields[match[1]]), template)  # noqa: B023 - called at once
        found.append({**fields, "prompt": text})
    unique = list({_digest(each): each for each in found}.values())
    random.Random(recipe.seed).shuffle(unique)
    return unique[: recipe.rows or None]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# --- teachers and scorers -------------------------------------------------------------------------


@contextmanager
def _opened(
    teacher: str,
    recipe: GenerateRecipe,
    settings: GenerateSettings,
    observe: Observe,
    progress: Progress | None,
) -> Iterator[Teacher]:
    if teacher.startswith(("http://", "https://")):
        yield _at_address(teacher, recipe)
        return
    with open_model(teacher, settings, observe=observe, progress=progress) as model:

        def answers(asked: Sequence[Messages], start: int) -> list[tuple[str, str]]:
            questions = [model.question(each, start + at) for at, each in enumerate(asked)]
            found = dict(model.replies(questions))
            return [(found[at].text, found[at].finish_reason) for at in range(len(asked))]

        identity = {"identity": model.identity(), **model.computed_by}
        yield Teacher(named(teacher, model.title), identity, answers)


def _at_address(url: str, recipe: GenerateRecipe) -> Teacher:
    if not recipe.teacher.model:
        raise ConfigError(
            "C004",
            "the recipe does not name the teacher's model",
            where="[teacher]",
            expected='model = "name", as the address knows it',
            remedy="add it to the recipe",
        )
    complete = _provided("vox_data.teachers", "openai")
    sampling = recipe.sampling

    def answer(messages: Messages, number: int) -> tuple[str, str]:
        body = {
            "model": recipe.teacher.model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed + number,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        key = os.environ.get(recipe.teacher.api_key, "")
        text, finish = complete(url, body, key=key, timeout=recipe.teacher.timeout)
        return text, finish

    def answers(asked: Sequence[Messages], start: int) -> list[tuple[str, str]]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(answer, asked, range(start, start + len(asked))))

    identity = {"url": url, "model": recipe.teacher.model}
    return Teacher(f"{recipe.teacher.model} at {url}", identity, answers)


def _scorer(table: Mapping[str, Any], recipe: Path) -> Judge:
    """Return the scorer of a table.

    Raises:
        ConfigError: C010, there is no such scorer, or it has other options.
    """
    make = _provided("vox_data.scorers", "eval")
    try:
        judge: Judge = make(dict(table), recipe.parent)
    except ValueError as error:
        raise ConfigError(
            "C010",
            "a scorer of the recipe cannot be used",
            where=recipe,
            found=error,
            remedy="correct it; docs/guide/evaluate.md has all scorers",
        ) from error
    return judge


def _provided(group: str, name: str) -> Any:
    for entry in entry_points(group=group):
        if entry.name == name:
            return entry.load()
    raise BackendError(
        "B013",
        "scorers, and teachers at an address, come with the plugin 'scorers'",
        found="it is not installed",
        remedy="vox plugin install scorers",
    )


def _judged(
    row: Row, given: tuple[str, str], *, checks: Sequence[tuple[str, Judge]], rating: Judge | None
) -> Row:
    """Return why an answer is rejected, if it is, or its rating.

    Args:
        given: the answer and its `finish_reason`.
    """
    answer, finish = given
    if finish == CUT_OFF:
        return {"rejected": "truncated", "why": "max-tokens, or the model's context, cut it off"}
    if not answer.strip():
        return {"rejected": "empty answer"}
    for name, check in checks:
        score, why = check(row, answer)
        if score < 1:
            return {"rejected": name, "why": why}
    if rating is None:
        return {}
    score, why = rating(row, answer)
    return {"rating": score, "why": why}


# --- answers --------------------------------------------------------------------------------------


def _lines(
    path: Path,
    prompts: Sequence[Row],
    recipe: GenerateRecipe,
    teacher: Teacher,
    judged: Callable[[Row, tuple[str, str]], Row],
    observe: Observe,
) -> list[dict[str, Any]]:
    """Compute what the file lacks, block by block; return all lines."""
    lines = continued(
        path, lambda whole: [json.loads(line) for line in whole], block=BLOCK, total=len(prompts)
    )
    for start in range(len(lines), len(prompts), BLOCK):
        block = prompts[start : start + BLOCK]
        system = [{"role": "system", "content": recipe.system}] if recipe.system else []
        asked = [[*system, {"role": "user", "content": each["prompt"]}] for each in block]
        kept = f"{start}/{len(prompts)} answers are kept in {path.parent}"
        with kept_if_stopped(kept), ThreadPoolExecutor(AT_ONCE) as pool:
            answers = teacher.answers(asked, start)
            found = list(pool.map(judged, block, answers))
        new = [
            {"row": row, "answer": answer, **result}
            for row, (answer, _), result in zip(block, answers, found, strict=True)
        ]
        append(path, _jsonl(new))
        lines += new
        observe(Notice(f"{len(lines)}/{len(prompts)} prompts answered"))
    return lines


def _jsonl(rows: Iterable[Row]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


# --- what is kept ---------------------------------------------------------------------------------


def _finished(
    folder: Path, recipe: GenerateRecipe, lines: Sequence[Row], teacher: str, digest: str
) -> Generated:
    """Write the rows that are kept, those that are not, and the report."""
    reasons: list[str | None] = [line.get("rejected") for line in lines]
    least = recipe.rating.least if recipe.rating else 0.0
    seen = set[tuple[str, str]]()
    for at, line in enumerate(lines):
        pair = line["row"]["prompt"].strip(), line["answer"].strip()
        if reasons[at] is None and line.get("rating", least) < least:
            reasons[at] = "rating"
        elif reasons[at] is None and pair in seen:
            reasons[at] = "duplicate"
        elif reasons[at] is None:
            seen.add(pair)
    rest = [at for at, reason in enumerate(reasons) if reason is None]
    if recipe.near and rest:
        texts = [f"{lines[at]['row']['prompt']}\n{lines[at]['answer']}" for at in rest]
        for at, _ in near_duplicates(texts, len(texts), recipe.near).tolist():
            reasons[rest[at]] = "near duplicate"
    made = [
        {
            "prompt": line["row"]["prompt"],
            "completion": line["answer"],
            **({"rating": line["rating"]} if "rating" in line else {}),
            "provenance": {"teacher": teacher, "generation": digest, "number": at},
        }
        for at, line in enumerate(lines)
    ]
    kept = [row for row, reason in zip(made, reasons, strict=True) if reason is None]
    rejected = [
        {**row, "rejected": reason, "why": line.get("why", "")}
        for row, reason, line in zip(made, reasons, lines, strict=True)
        if reason is not None
    ]
    counts = dict(sorted(Counter(reason for reason in reasons if reason).items()))
    write_bytes(folder / TRAIN, _jsonl(kept))
    write_bytes(folder / REJECTED, _jsonl(rejected))
    report = {"digest": digest, "teacher": teacher, "prompts": len(lines), "kept": len(kept)}
    write_json(folder / REPORT, {**report, "rejected": counts})
    return Generated(folder, len(lines), len(kept), counts)
