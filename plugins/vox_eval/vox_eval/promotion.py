"""Promote a model: evaluate it and the one it is to replace, decide by a gate, record, move a name.

    registry/promotions/NAME-DIGEST/
      promotion.json            gate, models, measurements, decision; all inputs by digest
      MODEL-BACKEND-SEED/       evaluation.json, eval.jsonl and scorecard.json of each evaluation

The evaluations are those of `vox eval`, in its folders: what it has computed before is not computed
again. Only a yes writes records. They are copies, so `verify` recomputes the decision from them
alone: without models, suites or scorers.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from vox_core.api import files, models
from vox_core.api.generating import GenerateSettings, open_base, open_model
from vox_core.api.models import REGISTRY, ModelReference, Observe, resolve_reference
from vox_core.contract import Notice
from vox_core.errors import ConfigError, ProofError, command
from vox_eval import registry
from vox_eval.evaluation import Evaluated, evaluate
from vox_eval.gate import Decision, Evidence, Gate, decide, foretell, read_gate
from vox_eval.leakage import Leakage, find_leakage
from vox_eval.page import PAGE
from vox_eval.scorecard import EVALUATION, SAMPLES, SCORECARD, Scorecard, alike, stored_scorecard
from vox_eval.suites import Suite, json_digest, read_suites

PROMOTION = "promotion.json"
FORMAT = 1
_AGAIN = "let nothing write to it, and run the command again"
TIMED = 10
"""Answers whose median time is the seconds of an answer."""
SIDES = ("candidate", "current")
_FILES = (EVALUATION, SAMPLES, SCORECARD)
_UNKNOWN = """has no record of its training rows (plan.json), so the gate's limit on leakage stays \
undecided; name the run itself instead of a copy, or set leakage = 1 under [limits] of the gate"""


@dataclass(frozen=True, slots=True)
class Promotion:
    """A decision on a candidate; `folder` has its records if it is a yes.

    Args:
        references: side, candidate or current -> run or model.
        evaluations: side, backend and seed -> the folder of `vox eval`; none if the training rows
            alone are a no.
        uncompared: what the name stood for, if the candidate was compared with another model.
    """

    name: str
    references: Mapping[str, str]
    decision: Decision
    leakage: Leakage
    evaluations: Mapping[str, Path]
    uncompared: str | None = None
    folder: Path | None = None

    @property
    def next(self) -> str:
        """Return the next step, as words or a command."""
        if not self.evaluations:
            return "take these rows out of the suites, or train again without them"
        pages = " and ".join(str(each / PAGE) for each in [*self.evaluations.values()][:2])
        return {
            "yes": command("vox", "serve", self.name),
            "no": f"compare the answers in {pages}",
            "not enough evidence": "add rows to the suites, or settle the check that is undecided",
        }[self.decision.answer]


@dataclass(frozen=True, slots=True, eq=False)
class _Contest:
    """Two models by their sides, and what they are held against.

    Args:
        before: the registry's entry of the gate's name; None for nothing.
    """

    gate: Gate
    gate_digest: str
    suite: Suite
    references: Mapping[str, str]
    models: Mapping[str, ModelReference]
    before: Mapping[str, str] | None


def promote(
    candidate: str,
    gate_file: Path,
    *,
    over: str | None = None,
    observe: Observe,
    progress: models.Progress | None = None,
) -> Promotion:
    """Decide whether a model is to replace another, and on a yes let the gate's name stand for it.

    Args:
        over: model or run to compare with; None: what the name stands for, or the base model.

    Raises:
        InputError: a fault of gate, suites, models or training rows, found before any work; M009,
            the name was moved by another process meanwhile.
        ProofError: V004, the candidate does not compute what was trained.
    """
    gate, digest = read_gate(gate_file)
    registry.require_name(gate.name)
    suite = read_suites([gate_file.parent / each for each in gate.suites])
    for line in foretell(gate, suite, gate_file):
        observe(Notice(line))
    contest = _contest(candidate, over, gate, digest, suite, progress)
    leakage = Leakage((), 0, sum(len(task.examples) for task in suite.tasks), (), None)
    if gate.limits.leakage < 1:
        leakage = find_leakage(contest.references[SIDES[0]], suite)
    for unknown in leakage.unknown or ():
        observe(Notice(f"leakage is not known: {unknown} {_UNKNOWN}", "warning"))
    shared = {"leakage": leakage.share(gate.limits.leakage)}
    early = Promotion(gate.name, contest.references, decide(gate, {}, shared), leakage, {})
    if early.decision.answer == "no":  # whatever the evaluations would show
        return early
    _prove(contest, observe)
    evaluated = dict(_evaluated(contest, observe, progress))
    cards = {key: each.card for key, each in evaluated.items()}
    suites = {key: each.digest for key, each in _suites(contest).items()}
    measured = {**shared, **_measured(contest, observe)}
    decision = decide(gate, _evidence(gate, cards, suites), measured)
    folders = {key: each.folder for key, each in evaluated.items()}
    before, other = contest.before, contest.models[SIDES[1]].digest()
    uncompared = before["reference"] if before and before["digest"] != other else None
    done = replace(early, decision=decision, evaluations=folders, uncompared=uncompared)
    if decision.answer == "yes":
        done = replace(done, folder=_record(contest, done, cards, suites, measured))
    return done


def _contest(
    candidate: str,
    over: str | None,
    gate: Gate,
    digest: str,
    suite: Suite,
    progress: models.Progress | None,
) -> _Contest:
    own, before = resolve_reference(candidate, progress=progress), registry.current(gate.name)
    base = str(own.base.path) if own.adapter else None
    over = over or (gate.name if before else base)
    other = resolve_reference(over, progress=progress) if over else own
    if own.digest() == other.digest():
        raise ConfigError(
            "C004",
            "there is no other model to compare the candidate with",
            where=candidate,
            found="the same model" if over else "a base model, and none was promoted before",
            remedy="name a model or run with --over",
        )
    references = dict(zip(SIDES, map(_plain, (candidate, over or "")), strict=True))
    both = dict(zip(SIDES, (own, other), strict=True))
    return _Contest(gate, digest, suite, references, both, before)


def _plain(reference: str) -> str:
    """Return a reference that means the same in every folder."""
    reference = (models.promoted(reference) or {"reference": reference})["reference"]
    return str(Path(reference).resolve()) if Path(reference).exists() else reference


def _prove(contest: _Contest, observe: Observe) -> None:
    """Compare the loaded candidate with the one that trained, if its run has recorded that.

    Raises:
        ProofError: V004.
    """
    own = contest.models[SIDES[0]]
    if not own.adapter or not own.folder:
        return
    if probe := models.read_probe(own):
        observe(Notice("loading the candidate to verify that it computes what was trained"))
        for settings in _settings(contest.gate):
            with open_base(own, {"adapter": own.adapter}, settings, observe=observe) as opened:
                dtype = opened.job.dtype
                models.check_probe(opened.model, "adapter", probe, dtype, own.folder)


def _settings(gate: Gate) -> list[GenerateSettings]:
    backends = gate.backends or [None]
    return [GenerateSettings(backend=each, dtype=gate.compute_dtype) for each in backends]


def _evaluated(
    contest: _Contest, observe: Observe, progress: models.Progress | None
) -> Iterator[tuple[str, Evaluated]]:
    evaluated = partial(evaluate, out=None, observe=observe, progress=progress)
    for settings in _settings(contest.gate):
        for seed, suite in _suites(contest).items():
            for side, reference in contest.references.items():
                done = evaluated(reference, suite=suite, settings=settings)
                yield _key(side, settings.backend, seed), done


def _key(side: str, backend: str | None, seed: str) -> str:
    return "-".join(filter(None, (side, backend, seed)))


def _suites(contest: _Contest) -> dict[str, Suite]:
    """Return the suite of each seed, or of no other seed than its own."""
    seeds = contest.gate.seeds
    return {str(each): _seeded(contest.suite, each) for each in seeds} or {"": contest.suite}


def _seeded(suite: Suite, seed: int) -> Suite:
    """Return the suite with another seed of every task."""
    tasks = []
    for task in suite.tasks:
        sampling = task.table.sampling.model_copy(update={"seed": seed})
        tasks.append(replace(task, table=task.table.model_copy(update={"sampling": sampling})))
    return replace(suite, tasks=tuple(tasks))


def _evidence(gate: Gate, cards: Mapping[str, Scorecard], suites: Mapping[str, str]) -> Evidence:
    """Return the scorecards by backend and side.

    Args:
        suites: seed -> digest of its suite.

    Raises:
        ValueError: a scorecard is of another suite.
    """

    def of(side: str, backend: str | None) -> list[Scorecard]:
        found = {seed: cards[_key(side, backend, seed)] for seed in suites}
        if any(card.suite_digest != suites[seed] for seed, card in found.items()):
            raise ValueError("scorecards of different suites")
        return list(found.values())

    return {
        each or "": (of(SIDES[0], each), of(SIDES[1], each)) for each in gate.backends or [None]
    }


def _mixed(folders: Mapping[str, Path]) -> list[str]:
    """Return the faults of evaluations that are of several models on one side, or of one model on
    both sides."""
    found: dict[str, set[tuple[str, ...]]] = {side: set() for side in SIDES}
    for key, folder in folders.items():
        model = files.read_json(folder / EVALUATION)["model"]
        found[key.partition("-")[0]].add((model["identity"], model["dtype"], model["quant"]))
    sides = [{each[0] for each in found[side]} for side in SIDES]
    faults = [
        f"the evaluations of the {side} are of several models"
        for side in SIDES
        if len({each[0] for each in found[side]}) > len({each[1:] for each in found[side]})
    ]
    return faults + (["candidate and current are one model"] if sides[0] & sides[1] else [])


def _measured(contest: _Contest, observe: Observe) -> dict[str, float]:
    """Return size and speed of the candidate, under the names of their limits."""
    own = contest.models[SIDES[0]]
    tensors = own.adapter.tensors().values() if own.adapter else ()
    megabytes = (own.weights.nbytes + sum(each.nbytes for each in tensors)) / 1e6
    if not contest.gate.limits.seconds_per_answer:
        return {"megabytes": megabytes}
    took = max(_seconds(contest, settings, observe) for settings in _settings(contest.gate))
    return {"megabytes": megabytes, "seconds-per-answer": took}


def _seconds(contest: _Contest, settings: GenerateSettings, observe: Observe) -> float:
    """Return the median time of the first answers, one at a time, after one to warm up."""
    tasks = [task for task in contest.suite.tasks if task.scorer.asks == "answer"]
    asked = [(each, task.settings()) for task in tasks for each in task.examples][:TIMED]
    took = []
    with open_model(contest.references[SIDES[0]], settings, observe=observe) as model:
        for example, sampling in asked[:1] + asked:
            began = time.perf_counter()
            "".join(model.reply(example.messages, 0, sampling))
            took.append(time.perf_counter() - began)
    return median(took[1:])


# --- records --------------------------------------------------------------------------------------


def _record(
    contest: _Contest,
    done: Promotion,
    cards: Mapping[str, Scorecard],
    suites: Mapping[str, str],
    measured: Mapping[str, float | None],
) -> Path:
    """Write the records, and move the name; return the records' folder.

    Raises:
        ModelError: M009, a model was changed while it was evaluated.
    """
    if faults := _mixed(done.evaluations):
        what = "a model was changed while it was evaluated"
        raise registry.fault(done.name, what, faults[0], _AGAIN)
    titles = {side: next(cards[key].model for key in cards if side in key) for side in SIDES}
    entries = {
        side: {"reference": each, "title": titles[side], "digest": contest.models[side].digest()}
        for side, each in contest.references.items()
    }
    facts: dict[str, Any] = {
        "format": FORMAT,
        "version": version("vox-ml-eval"),
        "name": done.name,
        **entries,
        "gate": contest.gate.to_json(),
        "gate_digest": contest.gate_digest,
        "suites": suites,
        "evaluations": {
            key: {name: files.file_sha256(folder / name) for name in _FILES}
            for key, folder in done.evaluations.items()
        },
        "leakage": asdict(done.leakage),
        "measured": measured,
        "decision": asdict(done.decision),
    }
    digest = json_digest(facts)
    folder = REGISTRY / "promotions" / f"{done.name}-{digest[:12]}"
    with registry.changing(done.name, contest.before["digest"] if contest.before else None):
        if not folder.exists():
            files.make_folder(folder.parent)
            with files.atomic_folder(folder) as temporary:
                for key, source in done.evaluations.items():
                    (temporary / key).mkdir()
                    for name in _FILES:
                        shutil.copyfile(source / name, temporary / key / name)
                files.write_json(temporary / PROMOTION, {"digest": digest, **facts})
        registry.move(done.name, **entries[SIDES[0]], promotion=str(folder), records=digest)
    return folder


def verify(reference: str) -> tuple[Decision, Path]:
    """Recompute a decision from its records alone; return it with their folder.

    Args:
        reference: a name of the registry, or the folder of the records, whose name ends with the
            first 12 digits of their digest. The registry has the whole digest.

    Raises:
        ConfigError: C011, there are no such records.
        ProofError: V005, the records have changed, or give another decision.
    """
    entry = None if Path(reference).is_dir() else registry.current(reference)
    folder = Path(entry["promotion"] if entry else reference)
    try:
        facts: Any = files.read_json(folder / PROMOTION)
        said, files_of = facts.pop("digest"), facts["evaluations"].items()
        known = {(key, name): sha256 for key, each in files_of for name, sha256 in each.items()}
        candidate = facts["candidate"]["digest"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            "C011",
            "there are no records of a promotion",
            where=folder,
            found=getattr(error, "strerror", None) or str(error).partition("\n")[0],
            expected=f"a name of `vox registry list`, or a folder with {PROMOTION}",
            remedy="`vox registry list` shows the names",
        ) from error
    faults = [
        f"{key}/{name} is missing or has changed"
        for (key, name), sha256 in known.items()
        if not (path := folder / key / name).is_file() or files.file_sha256(path) != sha256
    ]
    digest = json_digest(facts)
    faults += [f"{PROMOTION} has changed"] if digest != said else []
    if not folder.name.endswith(digest[:12]):
        faults.append(f"{PROMOTION} has the digest {digest[:12]}…, and its folder another name")
    if entry and (entry["digest"], entry.get("records")) != (candidate, digest):
        faults.append(f"{reference} stands for another model, or for other records")
    if not faults:
        try:
            decision = _decided(folder, facts)
            if alike(json.loads(json.dumps(asdict(decision))), facts["decision"]):
                return decision, folder
            faults = [f"the records decide {decision.answer!r}, or by other findings"]
        except (ValueError, TypeError, KeyError) as error:
            faults = [str(error)]
    raise ProofError(
        "V005",
        "the records do not give the decision of the promotion",
        where=folder,
        faults=faults,
        remedy="restore the records from a backup, or promote the model again",
    )


def _decided(folder: Path, facts: Any) -> Decision:
    gate, leakage = Gate.model_validate(facts["gate"]), Leakage(**facts["leakage"])
    folders = {key: folder / key for key in facts["evaluations"]}
    if faults := _mixed(folders):
        raise ValueError(faults[0])
    cards = {key: stored_scorecard(each) for key, each in folders.items()}
    measured = {**facts["measured"], "leakage": leakage.share(gate.limits.leakage)}
    return decide(gate, _evidence(gate, cards, facts["suites"]), measured)
