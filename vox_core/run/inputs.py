"""Read the inputs of a run: rows, model, the backend that will train, and the data sets.

Cheap things first, so that a typing error in a data file is found before a model is downloaded.
Nothing is written but the caches of models and of tokens. `vox data preview` and `vox data stats`
open data sets in the same way, without a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vox_core import bounded_json, models
from vox_core.adapter.targets import linear_modules, select_targets
from vox_core.contract import SFT, Notice, ObjectiveSpec
from vox_core.data.audit import Audit, audit, require_sound, vocabulary_of
from vox_core.data.batching import Ordering, filled
from vox_core.data.chosen import Chosen, Report, choose_rows
from vox_core.data.dataset import Dataset, assumed_dataset
from vox_core.data.dataset_cache import open_dataset
from vox_core.data.formats import find_split, place_of
from vox_core.data.rows import (
    Answers,
    Rewards,
    answers_for,
    learns_from_answers,
    load_rewards,
    objective_of,
)
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import BackendError, ConfigError, DataError, InputError
from vox_core.host import Request, Selection, choose
from vox_core.host.judge import lacking
from vox_core.host.load import Backend, Observe, call_hook, ignore, provider
from vox_core.host.select import Seen
from vox_core.run.plan import sequence_length, settled_quant
from vox_core.run.reference import Fetching, ModelReference, resolve_model, resolve_reference
from vox_core.weights import FULL_PRECISION, Weights, open_weights

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from vox_core.config import DataSource, TrainSettings
    from vox_core.contract import AdapterState, Evaluator, Objective, Quant
    from vox_core.data.checked import CheckedFile
    from vox_core.models import Progress
    from vox_core.run.start import Start

_TAKEN = (("rewards", "reward", "grpo and ppo", "exact"), ("teacher", "teacher", "distill", "RUN"))
"""What an objective may need, its setting, the objectives that need it, and a value."""
_OF_ROLLOUTS = ("rollouts", "rollout_tokens", "rollout_temperature", "updates")


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Rows, model and backend of a run.

    Args:
        rows: data files, with the rows that the filters leave of them.
        quant: of the base while it trains, that of its files included.
        seq_len: in tokens.
        backend: loaded; `selection` says why it was chosen.
        seen: plugins and hardware, as they were when the backend was chosen.
        objective: None for supervised training.
        rewards: judge the answers that the model learns from.
        teacher, start: whom the model learns from, and the adapter to start from; None without.
        evaluator: evaluates the model on `--eval-suite`; None without one.
        fetched: whether the model was downloaded or converted just now.
    """

    rows: Chosen
    model: models.LocalModel
    weights: Weights
    config: Mapping[str, Any]
    quant: Quant
    seq_len: int
    backend: Backend
    selection: Selection
    seen: Seen
    objective: Objective | None = None
    rewards: Rewards = ()
    teacher: ModelReference | None = None
    start: Start | None = None
    evaluator: Evaluator | None = None
    fetched: bool = False

    @property
    def reference_adapter(self) -> AdapterState | None:
        """Adapter of the model that the learner is compared with: the teacher's, or without a
        teacher the starting one."""
        source = self.teacher or self.start
        return source.adapter if source else None


def read_inputs(
    settings: TrainSettings,
    resumed_from: str | None = None,
    progress: Progress | None = None,
    *,
    only_planned: bool = False,
    start: Start | None = None,
) -> RunInputs:
    """Read everything; InputError for the first thing that is wrong.

    Args:
        resumed_from: id of the backend of the run that is resumed.
        only_planned: nothing will be trained, so there may be no data.
        start: the adapter that the settings name, with its base.
    """
    objective = objective_of(settings.objective_spec)
    _require_rollouts(settings, objective)
    rewards = load_rewards(settings.reward)
    evaluator = _evaluator(settings.eval_suite) if settings.eval_suite else None
    nothing = only_planned and not settings.data
    answers = answers_for(objective, rewards)
    rows = Chosen([], [], Report()) if nothing else chosen_rows(settings, answers, progress)
    _require_fields(rewards, rows)
    seen, fetching = Seen(), Fetching(progress)
    request = _request(settings, objective, resumed_from)
    # Before a model is fetched, so that a missing backend is found in a second.
    seen.select(request)
    model = start.source.base if start else _model(settings, fetching)
    if fetching.happened:  # which may have taken an hour: other memory is free by now
        seen = Seen()
    weights = open_weights(model.path)
    quant = settled_quant(settings.quant, weights.quant)
    request = replace(request, model_type=model.model_type, quant=quant)
    backend, selection = choose_for(request, weights, seen)
    teacher = _teacher(settings, model.tokenizer, fetching)
    if settings.method == "full" and objective and "reference" in objective.needs:
        backend.require("load")  # of a second model beside the trainer
    if teacher:
        _require_loads(backend, teacher, settings)
    select_targets(linear_modules(weights.tensors, model.model_type), settings.targets)
    config = bounded_json.read(model.path / "config.json")
    seq_len = sequence_length(settings, config)
    _require_tokens(objective, vocabulary_of(config))
    return RunInputs(
        rows, model, weights, config, quant, seq_len, backend, selection, seen, objective, rewards,
        teacher, start, evaluator, fetching.happened,
    )  # fmt: skip


def _model(settings: TrainSettings, progress: Progress | None) -> models.LocalModel:
    revision, template = settings.revision, settings.template
    return resolve_model(settings.model, revision=revision, template=template, progress=progress)


def _evaluator(suites: Sequence[Path]) -> Evaluator:
    """Let the plugin that evaluates check the suites (B013 without one)."""
    try:
        plugin = provider("hooks", "vox_evaluator")
    except BackendError as error:
        what = "no installed plugin evaluates models"
        raise error.but(what=what, where=f"--eval-suite {suites[0]}") from error
    evaluator: Evaluator = call_hook(plugin, "vox_evaluator", suites=suites)
    return evaluator


def chosen_rows(
    settings: TrainSettings, answers: Answers | None = None, progress: Progress | None = None
) -> Chosen:
    """Files to train and to validate on, with the rows that the filters leave, and a report.

    Args:
        answers: as for `parse_row`; by default what the objective needs, whatever the reward reads.

    Raises:
        ConfigError: C004, no data is named, or held-out rows twice; C009, a package is missing.
        DataError: D001, D002, D003, D020 to D023.
    """
    if not settings.data:
        raise ConfigError(
            "C004",
            "there is no data",
            where="--data",
            expected="a data file, a folder with train.jsonl, or hf:owner/name",
            remedy="name it: --data train.jsonl; `vox quickstart` shows one that works",
        )
    train, valid = find_split(settings.data, settings.valid)
    if settings.valid_share and valid:
        raise ConfigError(
            "C004",
            "held-out rows are asked for twice",
            where="--valid-share",
            found=f"{', '.join(map(str, valid))}, too",
            remedy="leave out --valid-share or --valid; of a folder, name its train.jsonl",
        )
    answers = answers or answers_for(objective_of(settings.objective_spec))
    return choose_rows(train, valid, settings.policy(), settings.fields, answers, progress)


def _require_fields(rewards: Rewards, rows: Chosen) -> None:
    """Refuse the first row without a field that a reward needs (D003)."""
    needed = {field: source.name for source, reward in rewards for field in reward.fields}
    for file in (*rows.train, *rows.valid) if needed else ():
        for number, row in file.parsed():
            if missing := [field for field in needed if field not in row]:
                raise DataError(
                    "D003",
                    "a row lacks a field that a reward needs",
                    where=place_of(file.path, number),
                    found=f"the fields {', '.join(row)}",
                    expected=", ".join(f"{field} (for {needed[field]})" for field in missing),
                    remedy="add it, or name its column: --field NAME=COLUMN",
                )


def _require_rollouts(settings: TrainSettings, objective: Objective | None) -> None:
    """Refuse what the objective needs and has not got, or has and does not need (C004)."""
    needs = objective.needs if objective else frozenset()
    found, remedy = "", ""
    for need, setting, others, value in _TAKEN:
        given = bool(getattr(settings, setting))
        if given != (need in needs):
            takes = f"takes none; --{setting} is for {others}" if given else "needs one"
            found = f"{'' if given else 'no '}--{setting}; {settings.objective} {takes}"
            remedy = f"leave out --{setting}" if given else f"name one, such as --{setting} {value}"
    if objective and learns_from_answers(objective):
        if settings.dropout:
            found = "--dropout, which makes another model of the one that answers"
            remedy = "leave out --dropout"
        if settings.rollouts < objective.min_rollouts:
            found = f"--rollouts {settings.rollouts}"
            remedy = f"use --rollouts {objective.min_rollouts} or more"
        if settings.max_steps % settings.updates:
            found = f"--max-steps {settings.max_steps} with --updates {settings.updates}"
            remedy = "make --max-steps a multiple of --updates"
    elif idle := [name for name in _OF_ROLLOUTS if name in settings.model_fields_set]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        found, remedy = f"{flags}, and nothing is sampled", f"leave out {flags}"
    if found:
        raise ConfigError(
            "C004",
            "the settings do not fit the objective",
            where=f"--objective {settings.objective}",
            found=found,
            remedy=remedy,
        )


def _teacher(settings: TrainSettings, tokenizer: Path, fetching: Fetching) -> ModelReference | None:
    """Find the teacher, which has to have the same tokenizer (C004)."""
    if settings.teacher is None:
        return None
    where = f"--teacher {settings.teacher}"
    try:
        teacher = resolve_reference(settings.teacher, progress=fetching)
    except InputError as error:
        moved = "; if it has moved, name its new place with --teacher" if settings.resume else ""
        place = "" if error.where in (None, settings.teacher) else f": {error.where}"
        raise error.but(where=where + place, remedy=error.remedy + moved) from error
    theirs, ours = (
        load_tokenizer(folder).get_vocab() for folder in (teacher.base.tokenizer, tokenizer)
    )
    if theirs != ours:
        token, _ = min(theirs.items() ^ ours.items(), key=lambda pair: pair[::-1])  # the lowest id
        found, expected = (
            f"{len(each):,} tokens, {token!r} has id {each.get(token, 'none')}"
            for each in (theirs, ours)
        )
        raise ConfigError(
            "C004",
            "the teacher has another tokenizer",
            where=where,
            found=found,
            expected=f"the tokenizer of --model: {expected}",
            remedy="choose a teacher of the same family",
        )
    return teacher


def _require_loads(backend: Backend, teacher: ModelReference, settings: TrainSettings) -> None:
    """Refuse a teacher that the backend cannot load (B002, B004)."""
    backend.require("load")
    request = Request("load", quant=teacher.quant, model_type=teacher.base.model_type)
    if lack := lacking(request, backend.manifest.capabilities):
        raise BackendError(
            "B002",
            f"backend {backend.id!r} cannot load the teacher",
            where=f"--teacher {settings.teacher}",
            found=lack,
            remedy="choose another teacher, or a --backend that has it",
        )


def _require_tokens(objective: Objective | None, vocabulary: int | None) -> None:
    """Refuse more tokens of a teacher than there are (C004)."""
    if objective and vocabulary and objective.top_k > vocabulary:
        raise ConfigError(
            "C004",
            "the teacher has fewer tokens than it is to propose",
            where="--objective-option top_k",
            found=objective.top_k,
            expected=f"at most {vocabulary}, the model's vocabulary",
            remedy="lower top_k",
        )


def _request(
    settings: TrainSettings, objective: Objective | None, resumed_from: str | None
) -> Request:
    return Request(
        operation="train",
        quant=settings.quant,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        method=settings.method,
        optimizer=settings.optimizer,
        explicit=settings.backend,
        resumed_from=resumed_from,
        allow_cpu=settings.allow_cpu,
        several_targets=objective is not None and objective.top_k > 0,
    )


def choose_for(
    request: Request, weights: Weights, seen: Seen | None = None
) -> tuple[Backend, Selection]:
    """`choose`, with another remedy where only the folder's own quantisation is in the way.

    Args:
        seen: plugins and hardware, as found for another request of the same command.

    Raises:
        BackendError: no installed backend can do it.
    """
    seen = seen or Seen()
    try:
        return choose(request, seen=seen)
    except BackendError as error:
        unquantised = seen.verdicts(replace(request, quant=None))
        if weights.quant == "none" or "available" not in {each.status for each in unquantised}:
            raise
        remedy = FULL_PRECISION.partition(",")[0]
        if request.method != "full":
            remedy = f"install a backend that has {weights.quant}, or {remedy}"
        where = f"{weights.folder}, whose weights are quantised ({weights.quant})"
        raise error.but(where=where, remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class Datasets:
    """Training and validation data of a run.

    Args:
        audits: what was found of the masks; by training and validation.
    """

    train: Dataset
    valid: Dataset | None
    audits: Mapping[str, Audit] = field(default_factory=dict)


def build_datasets(
    settings: TrainSettings, inputs: RunInputs, progress: Progress | None = None
) -> Datasets:
    """Both data sets, from the cache or made now.

    Without data files, as only a plan can be, one step of documents of `seq_len` tokens is assumed.

    Raises:
        DataError: nothing can be trained, or the order cannot be had.
    """
    if not settings.data:
        assumed = assumed_dataset(settings.batch_size, inputs.seq_len)
        return Datasets(in_order(assumed, settings), None)
    opener = Opener(inputs.model, inputs.config, inputs.seq_len, settings.objective_spec, progress)
    held_out = inputs.rows.valid
    train = in_order(opener.open(inputs.rows.train), settings)
    valid = opener.open(held_out) if held_out else None
    audits = opener.audits(train, valid)
    require_sound(audits)
    return Datasets(train, valid, audits)


@dataclass(frozen=True)
class Opener:
    """Opens data files with a model's tokenizer, an objective and a length limit.

    Args:
        objective: decides which documents a row makes.
        observe: receives a notice before the tokenizer is loaded, which takes some seconds.
    """

    model: models.LocalModel
    config: Mapping[str, Any]
    seq_len: int
    objective: ObjectiveSpec = SFT
    progress: Progress | None = None
    observe: Observe = ignore

    @classmethod
    def of(
        cls, settings: TrainSettings, progress: Progress | None = None, observe: Observe = ignore
    ) -> Opener:
        model = _model(settings, progress)
        config = bounded_json.read(model.path / "config.json")
        seq_len = sequence_length(settings, config)
        return cls(model, config, seq_len, settings.objective_spec, progress, observe)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        self.observe(Notice("loading the tokenizer …"))
        return load_tokenizer(self.model.tokenizer)

    def open(self, files: Sequence[CheckedFile]) -> Dataset:
        """The data set, from the cache or made now; see `open_dataset`."""
        return open_dataset(
            files,
            self.model.tokenizer,
            lambda: self.tokenizer,
            self.seq_len,
            self.objective,
            progress=self.progress,
        )

    def audits(self, train: Dataset, valid: Dataset | None = None) -> dict[str, Audit]:
        """Audits of the masks, by `training` and `validation` as far as there are rows."""
        vocabulary = vocabulary_of(self.config)
        both = {"training": train, "validation": valid}
        return {what: audit(each, vocabulary, self.seq_len) for what, each in both.items() if each}


def in_order(dataset: Dataset, settings: TrainSettings) -> Dataset:
    """The data set in the order of `--source` and `--curriculum`.

    Raises:
        DataError: D031, no row says how difficult it is; D032, a source would never be trained.
    """
    if not settings.source and settings.curriculum == "none":
        return dataset
    first_G = dataset.starts_G1[:-1]
    sources_G, levels_G, notes = None, None, tuple[str, ...]()
    if settings.source:
        found = [find_split([source.path])[0] for source in settings.source]
        # By place: two sources may bring the same file, which is read for each.
        numbers = [number for number, paths in enumerate(found) for _ in paths]
        sources_G = np.array(numbers, np.int32)[dataset.documents_D["file"][first_G]]
    if settings.curriculum == "difficulty":
        difficulty_G = dataset.documents_D["difficulty"][first_G]
        unknown = int(np.isnan(difficulty_G).sum())
        if unknown == dataset.groups:
            raise DataError(
                "D031",
                "no row says how difficult it is",
                where="--curriculum difficulty",
                found="no field `difficulty` that is a number or a word: easy, medium, hard",
                remedy="leave out --curriculum, or write `difficulty` into the rows",
            )
        levels_G = filled(difficulty_G)
        if unknown:
            said = f"{unknown} of {dataset.groups} documents do not say how difficult they are, and"
            notes = (f"{said} are trained among those of the middle",)
    weights = tuple(source.weight for source in settings.source)
    ordering = Ordering(dataset.groups, weights, sources_G, levels_G)
    if settings.source:
        _require_all_trained(ordering, settings.source)
    return dataset.ordered(ordering, notes)


def _require_all_trained(ordering: Ordering, sources: tuple[DataSource, ...]) -> None:
    assert ordering.sources_D is not None
    there = np.bincount(ordering.sources_D, minlength=len(sources)).tolist()
    columns = zip(sources, there, ordering.counts(), strict=True)
    faults = [
        f"{source.path}: " + ("no document" if not rows else f"weight {source.weight:g} is too low")
        for source, rows, count in columns
        if not rows or not count
    ]
    if faults:
        raise DataError(
            "D032",
            "a source has a weight and would never be trained",
            where="--source",
            found=f"an epoch of {ordering.documents} documents",
            faults=faults,
            remedy="leave out this source, or give it a larger weight",
        )
