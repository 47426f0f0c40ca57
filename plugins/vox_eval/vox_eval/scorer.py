"""Define scorers, and find one by its name.

An installed package provides a scorer by an entry point of the scorer's name in the group
`vox_eval.plugins`. The entry point is an object with the hook `vox_scorer`, imported when a suite
names the scorer. The built-in scorers are entry points of this package.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast, dataclass_transform

import pluggy
import pydantic.dataclasses
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from vox_core.api.host import foreign_errors, known_plugins
from vox_core.api.settings import did_you_mean
from vox_core.errors import BackendError, PluginError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vox_core.api.generating import Conversation

PROJECT = "vox_eval"
ENTRY_POINTS = "vox_eval.plugins"

Asks: TypeAlias = Literal["answer", "choices", "text", "ideal"]

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """The scorer that a task names.

    Args:
        options: as in the suite, with `_` for `-`.
        folder: of the suite, which paths among the options are relative to.
    """

    name: str
    options: Mapping[str, Any]
    folder: Path

    @classmethod
    def of(cls, table: Mapping[str, Any], folder: Path) -> ScorerSpec:
        """Read a table of a suite: `name`, and the options beside it."""
        given = {key.replace("-", "_"): value for key, value in table.items() if key != "name"}
        return cls(str(table["name"]), given, folder)


@dataclass(frozen=True, slots=True)
class Example:
    """A row of a task.

    Args:
        id: digest of the row's content.
        fields: the row as it stands in its file.
        messages: the conversation to answer or to choose an end of; empty for a text.
        ideal: right answers; for choices, the right one; empty if the row has none.
        choices: ends of the conversation to choose from.
        text: to compute the likelihood of.
        place: file and line; empty for a row that a package makes.
    """

    id: str
    fields: Mapping[str, Any]
    messages: Conversation = ()
    ideal: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    text: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """Output of the model for an example.

    Args:
        text: the answer; empty where a scorer asks for choices or a text.
        log_probs: float32, of each token: of the answer, of each choice, or of the text.
        turns: earlier answers, each with what `Scorer.again` said to it.
    """

    text: str
    log_probs: Sequence[NDArray[Any]]
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one example.

    Args:
        value: finite; 0 or 1 if the scorer is `binary`.
        why: a few words for a reader of eval.jsonl.
        weight: of the example in the task's mean, the same for every model.
        answer: the answer as the scorer understands it, if that is not the output's text.
    """

    value: float
    why: str = ""
    weight: float = 1.0
    answer: str | None = None


class UnusableScorer(ValueError):
    """Faults of a task's scorer: unknown, or with options that it does not take."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class Scorer(ABC):
    """Scores examples. Its fields are its options; decorate it with `options`.

    Attributes:
        asks: what the model does with an example: generate an `answer`, or compute the
            log-probabilities of its `choices`, of its `text`, or of its right answers (`ideal`).
        binary: scores are 0 or 1, so that intervals and tests are those of proportions.
        higher_is_better: otherwise lower scores are.
        unit: of the scores, such as "bits per byte"; "" of a share or a mark.
        parallel: outputs scored at once, in threads.
    """

    asks: ClassVar[Asks] = "answer"
    binary: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = True
    unit: ClassVar[str] = ""
    parallel: ClassVar[int] = 1

    def check(self, example: Example) -> None:  # noqa: B027 - most rows need no check
        """Refuse a row that cannot be scored, before any work.

        Raises:
            ValueError: with what it lacks, such as "no ideal".
        """

    @abstractmethod
    def score(self, example: Example, output: Output) -> Score:
        """Score one output. Called in any order; the result depends on the arguments alone."""

    def again(self, example: Example, output: Output, score: Score) -> str | None:
        """Return what to say to the model so that it answers once more; None: `score` stands."""
        return None

    def metrics(self, outputs: Sequence[Output]) -> dict[str, float]:
        """Return more figures of a whole task for its scorecard."""
        return {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def options(kind: type[Any]) -> Any:
    """Make a class a frozen pydantic dataclass that refuses unknown options, NaN and infinity."""
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    return pydantic.dataclasses.dataclass(kind, config=config, frozen=True, kw_only=True)


class ScorerHooks:
    """The hook of this extension point."""

    @hookspec(firstresult=True)
    def vox_scorer(self, spec: ScorerSpec) -> Scorer:  # type: ignore[empty-body]
        """Return the scorer `spec.name` with its options.

        Raises:
            ValidationError: pydantic's, of the options; its faults are shown as the suite's.
            UnusableScorer: other faults of the suite.
        """


# --- finding one ----------------------------------------------------------------------------------


def find_scorer(spec: ScorerSpec) -> tuple[Scorer, str]:
    """Return the scorer that a task names, and the package that it comes from.

    Raises:
        UnusableScorer: there is none of that name, or its options are wrong.
        BackendError: B004, it cannot be imported; B014, two packages have that name.
        PluginError: X001, it raises something of its own, or gives no scorer.
    """
    installed = entry_points(group=ENTRY_POINTS)
    found = [each for each in installed if each.name == spec.name]
    packages = ", ".join(map(_package, found))
    if not found:
        known = sorted(each.name for each in installed)
        hint = _offered(spec.name) or did_you_mean(spec.name, known)
        hint = hint or f"there are {', '.join(known)}"
        raise UnusableScorer(f"there is no scorer {spec.name!r}; {hint}")
    if len(found) > 1:
        raise BackendError(
            "B014",
            f"two packages have a scorer {spec.name!r}",
            found=packages,
            remedy="uninstall one of them, or rename its entry point",
        )
    return _build(_loaded(found[0]), spec), packages


def _offered(name: str) -> str:
    """Return how to install the catalog's plugin with a scorer; empty if there is none."""
    plugins = known_plugins().values()
    owners = [each.id for each in plugins if name in each.provides.get("scorers", ())]
    return f"`vox plugin install {owners[0]}` installs it" if owners else ""


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _loaded(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:  # importing it runs its code
        raise BackendError(
            "B004",
            f"the scorer {entry.name!r} is installed but broken",
            where=entry.value,
            found=f"{type(error).__name__}: {error}",
            remedy="upgrade or uninstall its package, or report it to its authors",
        ) from error


def _build(plugin: object, spec: ScorerSpec) -> Scorer:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(ScorerHooks)
    faults: Sequence[str] = ()
    scorer: object = None
    with foreign_errors(spec.name, "vox_scorer", "scorer"):
        manager.register(plugin)
        try:
            scorer = manager.hook.vox_scorer(spec=spec)
        except ValidationError as error:
            faults = _faults(spec.name, error)
        except UnusableScorer as error:
            faults = error.faults
    if faults:
        raise UnusableScorer(*faults)
    if not isinstance(scorer, Scorer):
        raise PluginError(
            "X001",
            f"scorer {spec.name!r} gave a wrong result from vox_scorer",
            found=f"an object of type {type(scorer).__name__}",
            expected="a vox_eval.Scorer",
            remedy="mark the function with @vox_eval.hookimpl, and let it return a Scorer",
        )
    return scorer


def _faults(name: str, error: ValidationError) -> list[str]:
    faults = []
    for detail in error.errors():
        option = ".".join(str(part) for part in detail["loc"]).replace("_", "-")
        what = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "unexpected_keyword_argument":
            what = "unknown option"
        faults.append(f"scorer {name!r}: {option}: {what[:1].lower()}{what[1:]}")
    return faults


def options_of(scorer: Scorer) -> dict[str, Any]:
    """Return the options of a scorer, defaults included, as JSON types."""
    kind: Any = type(scorer)
    if not dataclasses.is_dataclass(kind):
        return {}
    return cast("dict[str, Any]", TypeAdapter(kind).dump_python(scorer, mode="json"))
