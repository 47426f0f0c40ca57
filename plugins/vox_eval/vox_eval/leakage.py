"""Rows of a suite that a model was trained on, exactly or nearly.

A run's plan.json names its training rows: the files by SHA-256, and the settings that chose among
them. The search goes on with the run that it started from (`--adapter`), or whose weights are its
base model. A row of the suite has leaked if its question is one of a training row, without case
and white space, or if their sequences of three words have a Jaccard similarity of `NEAR` (Broder
1997, "On the resemblance and containment of documents"). Sequences that more than a tenth of a
task's rows have, such as those of a common instruction, count for nothing. The search is exact.

An adapter of another tool and a merged folder have no record of their rows. Nothing is known of
their leakage then, which is another finding than a leakage of 0.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from vox_core.api.rows import CheckedFile, Record, chosen_rows, read_row
from vox_core.api.runs import PLAN, RunFolder
from vox_core.api.settings import TrainSettings
from vox_core.errors import ConfigError, VoxError
from vox_eval.suites import Suite, Task

NEAR = 0.8
COMMON = 0.1
"""Share of a task's rows that have a sequence of its instructions."""
WORDS = 3
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
"""Characters of scripts without spaces between words (Thai to Chinese), each of which is a word."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")
Words: TypeAlias = tuple[str, ...]


class Leak(NamedTuple):
    """A row of the suite, by its place or digest, and the training row that it is like."""

    similarity: float
    task: str
    row: str
    place: str


@dataclass(frozen=True, slots=True)
class Leakage:
    """Comparison of training rows with a suite's.

    Args:
        files: training files with their SHA-256.
        trained: number of their rows.
        rows: number of the suite's.
        unknown: models without a record of their training rows; None: no search was made.
    """

    files: tuple[tuple[str, str], ...]
    trained: int
    rows: int
    leaks: tuple[Leak, ...]
    unknown: tuple[str, ...] | None = ()

    def share(self, limit: float) -> float | None:
        """Return the share of the suite's rows that leaked; None if it is not known whether it is
        within the limit."""
        share = len(self.leaks) / self.rows
        searched = self.unknown is not None and not self.unknown
        return share if searched or share > limit else None


def find_leakage(reference: str, suite: Suite) -> Leakage:
    """Compare the training rows of a run, and of the runs that it started from, with a suite.

    Raises:
        ConfigError: C012, the training rows have changed, or are gone.
    """
    files, index, trained = list[CheckedFile](), _Index(suite.tasks), 0
    unknown, models = list[str](), [reference]
    while models:
        model = models.pop()
        if run := _run_of(model):
            plan = run.read(PLAN)
            files += _training_files(model, plan)
            models += _before(plan["settings"])
        else:
            unknown.append(model)
    for place, record in _records(files):
        index.compare(record, place)
        trained += 1
    named = tuple((str(file.path), file.origin.sha256) for file in files)
    return Leakage(named, trained, len(index.rows), tuple(index.found.values()), tuple(unknown))


def _run_of(model: str) -> RunFolder | None:
    path = Path(model)
    runs = [RunFolder(path), *([RunFolder(path.parent)] if path.name == "model" else [])]
    return next((run for run in runs if (run.path / PLAN).is_file()), None)


def _before(settings: Any) -> Iterator[str]:
    """Yield the models, other than a plain base, that a run started from."""
    if adapter := settings.get("adapter"):
        yield adapter
    base = settings.get("model", "")
    if _run_of(base) or (Path(base) / "vox_merge.json").is_file():
        yield base


def _training_files(run: str, plan: Any) -> list[CheckedFile]:
    try:
        found = chosen_rows(TrainSettings.model_validate(plan["settings"])).train
        then = {each["sha256"] for each in plan["sources"]["data"]}
        changed = [str(file.path) for file in found if file.origin.sha256 not in then]
        if not changed:
            return found
        fault = f"changed since then: {', '.join(changed)}"
    except (VoxError, ValueError, KeyError, TypeError) as error:
        fault = f"{error.what}: {error.where}" if isinstance(error, VoxError) else str(error)
    raise ConfigError(
        "C012",
        "the rows that the run was trained on cannot be compared with the suite",
        where=run,
        found=fault,
        expected="the data files, as they were when it was trained",
        remedy="restore them, or set leakage = 1 under [limits] of the gate to go without",
    )


def _records(files: Iterable[CheckedFile]) -> Iterator[tuple[str, Record]]:
    for file in files:
        for number, line in file.used_lines():
            yield f"{file.path}:{number}", read_row(line, file.path, number, answers="optional")


class _Index:
    """Rows of a suite by their words, and by their sequences of words."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.found = dict[int, Leak]()
        self.rows = list[tuple[str, str, int]]()
        self._same: dict[Words, list[int]] = defaultdict(list)
        self._having: dict[Words, list[int]] = defaultdict(list)
        self._common = set[Words]()
        for task in tasks:
            words = [_words(each.text or _joined(each.messages)) for each in task.examples]
            counts = Counter(sequence for each in words for sequence in _sequences(each))
            most = max(1, COMMON * len(words))
            self._common |= {sequence for sequence, count in counts.items() if count > most}
            for example, each in zip(task.examples, words, strict=True):
                own, number = _sequences(each) - self._common, len(self.rows)
                self.rows.append((task.id, example.place or example.id, len(own)))
                for table, key in ((self._same, each), *((self._having, key) for key in own)):
                    table[key].append(number)

    def compare(self, record: Record, place: str) -> None:
        """Note the rows of the suite that a training row is like: as a whole, or in what others
        than the assistant say, alone or (the first 16 turns) with all before."""
        messages = [{"role": m.role, "content": m.content} for m in record.messages or ()]
        asked = [at for at, each in enumerate(messages) if each["role"] != "assistant"]
        alone, begun = [[messages[at]] for at in asked], [messages[: at + 1] for at in asked[:16]]
        texts = [record.text or "", *map(_joined, [*alone, *begun, messages])]
        for words in dict.fromkeys(map(_words, texts)):
            own = _sequences(words) - self._common
            shared = Counter(at for each in own for at in self._having.get(each, ()))
            like = {at: n / (len(own) + self.rows[at][2] - n) for at, n in shared.items()}
            for at, near in {**like, **dict.fromkeys(self._same.get(words, ()), 1.0)}.items():
                if near >= max(NEAR, self.found[at].similarity if at in self.found else 0):
                    self.found[at] = Leak(near, *self.rows[at][:2], place)


def _joined(messages: Iterable[Any]) -> str:
    return "\n".join(str(each["content"]) for each in messages if each["role"] != "system")


def _words(text: str) -> Words:
    return tuple(_WORD.findall(text.casefold()))


def _sequences(words: Words) -> set[Words]:
    size = min(WORDS, len(words))
    return {words[at : at + size] for at in range(len(words) - size + 1)} if words else set()
