"""`vox data check`: faults of all rows, and what the files hold.

Each row of each file is read, whatever is wrong with those before. With a model its chat template
is applied to each well-formed row. If no row is faulty, the objective is tried on each, and, with a
model, the rows that `vox train` would use are tokenised and their masks audited; their tokens stay
in the cache. The function of a reward's file is loaded if the caller says so and the file is
written. Of the faults, counts and the first ones are kept, so that a file may be larger than
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vox_core.api.models import Observe, Progress, ignore
from vox_core.api.rows import (
    Answers,
    Audit,
    Examples,
    Finding,
    Opener,
    Record,
    Renderer,
    RenderError,
    RowError,
    RowFault,
    answers_for,
    chosen_rows,
    examples_of,
    find_split,
    load_rewards,
    next_step,
    objective_of,
    place_of,
    raw_lines,
    read_lines,
    row_of,
)
from vox_core.api.settings import TrainSettings
from vox_core.contract import SFT, ObjectiveSpec
from vox_core.errors import BackendError, InputError
from vox_data.stats import open_readable, require_data

_TEACHER, _REWARD = "MODEL", "FILE.py:FUNCTION"
_TO_CHOOSE = {
    "kto": "if the labels judge the answers,",
    _TEACHER: "choose a teacher with the same tokenizer, then",
    _REWARD: "write a reward, then",
}
"""What to decide before the next command, by a value in it."""
_OF_REFUSED = "change these rows to what the template takes, or choose another model"
_OF_MISFITS = "correct these rows or leave them out, or choose another --objective"
SHOWN = 20
SHOWN_OF_A_KIND = 5


@dataclass
class FaultCounts:
    """Faults of many rows: counted by kind, the first of them in full.

    Args:
        total: of all kinds.
        kinds: code and location, such as `roles in messages[…].role` -> how many.
        codes: those of the faults.
        remedy: for faults without a code.
        first: the first ones with their places, at most `SHOWN_OF_A_KIND` of a kind.
    """

    total: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    codes: set[str] = field(default_factory=set)
    remedy: str = ""
    first: list[str] = field(default_factory=list)

    def add(self, place: str, fault: RowFault) -> None:
        self.codes.add(fault.code)
        self.count(fault.kind, f"{place}: {fault}")

    def count(self, kind: str, text: str, remedy: str = "") -> None:
        """Count a fault without a code, such as a chat template's refusal."""
        self.total += 1
        self.remedy = remedy or self.remedy
        self.kinds[kind] += 1
        if len(self.first) < SHOWN and self.kinds[kind] <= SHOWN_OF_A_KIND:
            self.first.append(text)


@dataclass
class FileReport:
    """Rows of one file.

    Args:
        rows: well-formed ones that the chat template, if there is a model, takes.
        forms: name of a form -> rows.
        unused: field that vox does not use -> rows that have it.
        faulty: malformed rows, and those that the chat template refuses.
    """

    path: str
    side: str
    rows: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    faulty: int = 0

    @property
    def name(self) -> str:
        return place_of(Path(self.path), 0)


@dataclass
class CheckReport:
    """Result of a check.

    Args:
        template: the model whose chat template was applied, if any.
        compares: the objective compares the answers of a row.
        audits: "training" and "validation" -> audit of the masks, where no row is faulty.
        lacks: settings that `vox train` needs beside the given ones, where no row is faulty.
        error: what else `vox train` would refuse.
    """

    template: str | None
    compares: bool = False
    files: list[FileReport] = field(default_factory=list)
    faults: FaultCounts = field(default_factory=FaultCounts)
    audits: Mapping[str, Audit] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    error: InputError | None = None

    @property
    def notes(self) -> list[str]:
        """Files without any row."""
        counts: Counter[str] = Counter()
        for file in self.files:
            counts[file.path] += file.rows + file.faulty
        return [f"{path} has no rows" for path, rows in counts.items() if not rows]

    @property
    def sound(self) -> bool:
        """Whether all rows and their masks are free of faults."""
        wrong = any(each.of_level("error") for each in self.audits.values())
        return not (self.faults.total or self.notes or wrong)

    @property
    def choice(self) -> str:
        """Choice to make before `vox train`; empty if there is none."""
        return next((_TO_CHOOSE[each] for each in self.lacks.values() if each in _TO_CHOOSE), "")

    @property
    def forms(self) -> set[str]:
        return {form for file in self.files for form in file.forms}

    @property
    def next(self) -> str:
        """Remedy for the faults; empty if there are none."""
        paths = [Path(file.path) for file in self.files if file.faulty]
        rows = next_step(self.faults.codes, paths, not self.forms) if self.faults.codes else ""
        return "; ".join(filter(None, (rows, self.faults.remedy)))

    def to_json(self) -> dict[str, Any]:
        """All but the error."""
        files = [{**vars(each), "forms": dict(each.forms.most_common())} for each in self.files]
        return {
            "files": files,
            "rows": sum(file.rows for file in self.files),
            "faults": self.faults.total,
            "kinds": dict(self.faults.kinds.most_common()),
            "first": self.faults.first,
            "template": self.template,
            "notes": self.notes,
            "audit": {side: audit.to_json() for side, audit in self.audits.items()},
        }


def check(
    settings: TrainSettings,
    *,
    with_model: bool = False,
    with_reward: bool = False,
    progress: Progress | None = None,
    observe: Observe = ignore,
) -> CheckReport:
    """Check the data of `settings`.

    Args:
        with_model: apply the chat template of `settings.model`, and audit the masks.
        with_reward: run the files of `settings.reward`, to find their functions.
        progress: called with what is done, bytes read and all bytes.

    Raises:
        ConfigError: C004, no data is named.
        DataError: a file is missing or unreadable. Faults of rows are in the result.
        InputError: the model cannot be used.
    """
    require_data(settings, "vox data check")
    train, valid = find_split(settings.data, settings.valid)
    examples = examples_of(settings.objective_spec)
    # A reward of a file, which may not be written yet, reads whatever it likes.
    files = {each: Path(each.rpartition(":")[0]) for each in settings.reward if ":" in each}
    rewards = load_rewards(each for each in settings.reward if each not in files)
    answers = answers_for(objective_of(settings.objective_spec), rewards)
    report = CheckReport(settings.model if with_model else None, examples is not None)
    opener = Opener.of(settings, progress, observe) if with_model else None
    renderer = Renderer(opener.tokenizer) if opener else None
    for path, side in (*((path, "train") for path in train), *((path, "valid") for path in valid)):
        report.files.append(FileReport(str(path), side))
        _check_file(path, report, settings, answers, renderer, progress)
    if examples and report.sound:
        for file in report.files:
            _check_fit(file, report.faults, settings, examples)
    if report.sound:
        report.lacks = _lacks(settings, report)
    try:
        if opener and report.sound:
            report.audits = _audits(settings, opener, progress)
        load_rewards(each for each, file in files.items() if with_reward and file.exists())
    except InputError as error:  # the report is shown all the same
        report.error = error
    return report


def _check_file(
    path: Path,
    report: CheckReport,
    settings: TrainSettings,
    answers: Answers,
    renderer: Renderer | None,
    progress: Progress | None,
) -> None:
    file, faults = report.files[-1], report.faults
    source, distinct = open_readable(path, settings.fields), set[RowFault]()
    before = len(faults.first)
    for number, found in read_lines(path, source.lines, progress, answers):
        if isinstance(found, RowError):
            file.faulty += 1
            for fault in found.faults:
                faults.add(place_of(path, number), fault)
            if len(distinct) < 2:  # enough to tell one from several
                distinct.update(found.faults)
            continue
        file.forms[found.form if found.answered else "prompt"] += 1
        if settings.objective == SFT.name:  # others may read any field
            file.unused.update(found.unused)
        if renderer and (refusal := _refusal(renderer, found)):
            file.faulty += 1
            remedy = _OF_REFUSED if renderer.template else Finding("no-template").kind.remedy
            faults.count("chat template", f"{found.place}: {refusal}", remedy)
        else:
            file.rows += 1
    if file.faulty > len(distinct) == 1 and not file.forms and len(faults.first) > before:
        faults.first[before:] = [f"{file.name}: {distinct.pop().of_every_row}"]


def _check_fit(
    file: FileReport, faults: FaultCounts, settings: TrainSettings, examples: Examples
) -> None:
    """Count the well-formed rows that the objective cannot use."""
    for place, misfit in _misfits(file, settings, examples):
        file.faulty += 1
        file.rows -= 1
        faults.count(f"--objective {settings.objective}", f"{place}: {misfit}", _OF_MISFITS)


def _misfits(
    file: FileReport, settings: TrainSettings, examples: Examples
) -> Iterator[tuple[str, str]]:
    """Yield the place of each row that an objective cannot use, and why."""
    path = Path(file.path)
    for number, _, line in raw_lines(open_readable(path, settings.fields).lines):
        if misfit := row_of(line, path, number, examples, line).misfit:
            yield place_of(path, number), misfit


def _lacks(settings: TrainSettings, report: CheckReport) -> dict[str, str]:
    """Settings without which `vox train` would refuse these rows, or ignore what they are for."""
    if evident := _evident_objective(settings, report):
        return {"objective": evident}
    objective = objective_of(settings.objective_spec)
    needs, lacks = objective.needs if objective else (), dict[str, str]()
    if "rewards" in needs and not settings.reward:
        of_gym = all(file.path.startswith("gym:") for file in report.files)
        alone = "prompt" in report.forms  # there is no answer to compare with
        lacks["reward"] = "gym" if of_gym else _REWARD if alone else "exact"
    if "teacher" in needs and settings.teacher is None:
        lacks["teacher"] = _TEACHER
    return lacks


def _evident_objective(settings: TrainSettings, report: CheckReport) -> str | None:
    """The objective that the rows are made for, where supervised training was not chosen for them
    or could train none: pairs of answers, or answers that each have a label."""
    if settings.objective != SFT.name:
        return None
    if report.forms == {"preference"}:
        return "dpo"
    labelled = all(file.unused["label"] == file.rows for file in report.files)
    if not labelled or "objective" in settings.model_fields_set:
        return None
    try:
        examples = examples_of(ObjectiveSpec("kto"))
    except BackendError:  # not installed
        return None
    assert examples is not None
    fits = not any(True for file in report.files for _ in _misfits(file, settings, examples))
    return "kto" if fits else None


def _refusal(renderer: Renderer, record: Record) -> str:
    """Why the chat template refuses a row; empty if it does not."""
    try:
        renderer.render(record)
    except RenderError as fault:
        return str(fault)
    return ""


def _audits(
    settings: TrainSettings, opener: Opener, progress: Progress | None
) -> Mapping[str, Audit]:
    """Audits of the masks of the rows that `vox train` would use."""
    rows = chosen_rows(settings, progress=progress)
    train = opener.open(rows.train)
    valid = opener.open(rows.valid) if rows.valid else None
    return opener.audits(train, valid)
