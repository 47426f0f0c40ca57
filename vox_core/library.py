"""The Python API, which the commands use, too: `import vox_core as vox`.

    run = vox.train(model="smollm2-135m", data="train.jsonl", epochs=3)
    print(run.losses)
    with vox.load(run) as model:
        print(model.chat("How do I resume a run?"))
    vox.merge(run)

Each function blocks until its work is done, and prints nothing unless `progress=True`. Keywords are
the settings of the function's section in `vox.toml`, in snake_case; others come from the
environment and from `vox.toml`, as for a command. `on_event` receives events (`vox_core.contract`).

Ctrl-C, or the kernel's interrupt in a notebook, ends training after the current step with a
checkpoint; `vox.train(resume=run)` continues. Importing this module imports no array library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, Unpack, overload

from vox_core.config import (
    ChatSettings,
    GenerateSettings,
    MergeSettings,
    SamplingSettings,
    Section,
    TrainSettings,
    given,
    in_python,
    named_file,
    reading,
    require_keywords,
)
from vox_core.config.loading import as_keywords, keywords_named
from vox_core.contract import Event, Notice
from vox_core.display import display
from vox_core.errors import ConfigError
from vox_core.host.load import call_hook, provider, read_settings

if TYPE_CHECKING:
    from vox_core.keywords import Answers, Load, Merge, Sampling, Train, Trainer
    from vox_core.models import Progress
    from vox_core.run.answers import Answered
    from vox_core.run.artifacts import TrainReport
    from vox_core.run.load import Answer, OpenModel
    from vox_core.run.merge import MergeReport
    from vox_core.run.open_trainer import OpenTrainer
    from vox_core.run.telemetry import Summary

Reference: TypeAlias = "str | os.PathLike[str]"
"""A run, a run folder, an adapter saved by PEFT or mlx-lm, a merged folder, or a base model, here
or on the hub (owner/name)."""
Message: TypeAlias = "Mapping[str, str]"
Messages: TypeAlias = "str | Sequence[Message]"
"""A user's message, or a conversation: `role` and `content` of each message."""
Data: TypeAlias = "Reference | Iterable[Reference] | Iterable[Mapping[str, Any]]"
"""Files, folders or data sets of the hub; or rows, such as a `datasets.Dataset`."""
OnEvent: TypeAlias = Callable[[Event], None]

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder and the report of the call that made it.

    A `Run` is path-like: pass it wherever a run folder is expected.
    """

    path: Path
    report: TrainReport

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def losses(self) -> list[float | None]:
        """Training loss per step, including steps before a resume; None where not finite."""
        from vox_core.run.telemetry import read_run

        return [loss for _, loss in read_run(self.path).losses]

    def load(self, **options: Any) -> Model:
        """Load this run; see `load`."""
        return load(self, **options)

    def merge(self, out: Reference | None = None, **options: Any) -> MergeReport:
        """Merge this run; see `merge`."""
        return merge(self, out, **options)


@in_python
def train(
    *,
    model: Reference | None = None,
    data: Data | None = None,
    config: Reference | None = None,
    plan: Reference | None = None,
    on_event: OnEvent | None = None,
    progress: bool = False,
    **settings: Unpack[Train],
) -> Run:
    """Fine-tune a model, or resume a run (`resume=RUN`).

    Args:
        model: folder, hub id, GGUF file or id of the catalog.
        data: files, folders or data sets of the hub; or rows, which are copied to the cache.
        config: a `vox.toml` to read instead of the one in the current folder.
        plan: the output of `vox plan --json`, to run exactly.
        progress: show a bar and notices, in the notebook or on stderr.
        settings: keys of `[train]` and `[data]`.

    Raises:
        InputError: bad input, found before the first step; nothing was written.
        WorkError: training failed; the run folder keeps the finished work.
        KeyboardInterrupt: a second Ctrl-C, which stops within the step.
    """
    said = _keywords(TrainSettings, {"model": model, "data": data, **settings})
    from vox_core.run.train import train as run_training

    with reading(config), _receivers(on_event, progress) as (observe, transfer):
        pinned = None
        if plan is None:
            chosen = read_settings(TrainSettings, said)
        elif named := named_file():
            what, remedy = "a pinned plan holds every setting", "give plan or config"
            raise ConfigError("P012", what, where="config", found=str(named), remedy=remedy)
        else:
            from vox_core.run.resume import read_plan

            pinned = read_plan(Path(plan), said)
            chosen = pinned.settings
        report = run_training(chosen, observe=observe, progress=transfer, pinned=pinned)
    return Run(report.run, report)


@in_python
def plan(
    *,
    model: Reference | None = None,
    data: Data | None = None,
    config: Reference | None = None,
    on_event: OnEvent | None = None,
    progress: bool = False,
    **settings: Unpack[Train],
) -> Any:
    """Return what `train` would do with these settings, and the memory it would use.

    The plugin that provides the hook `vox_plan_run` does it, and its `PlanReport` comes back.

    Raises:
        InputError: bad input, or no such plugin is installed (the remedy installs it).
    """
    said = _keywords(TrainSettings, {"model": model, "data": data, **settings})
    with reading(config), _receivers(on_event, progress) as (observe, transfer):
        return call_hook(
            provider("hooks", "vox_plan_run"),
            "vox_plan_run",
            settings=read_settings(TrainSettings, said),
            progress=transfer,
            tell=lambda text: observe(Notice(text)),
        )


@in_python
def merge(
    run: Reference,
    out: Reference | None = None,
    *,
    config: Reference | None = None,
    on_event: OnEvent | None = None,
    progress: bool = False,
    **settings: Unpack[Merge],
) -> MergeReport:
    """Merge the adapter of `run` into its base model, and verify the result.

    Args:
        out: output folder; by default RUN-merged.
        settings: keys of `[merge]`.

    Raises:
        InputError: bad input, found before any work.
        WorkError: verification failed, or the disk did; no output is left.
    """
    said = _keywords(MergeSettings, {"out": out, **settings})
    with reading(config), _receivers(on_event, progress) as (observe, transfer):
        chosen = read_settings(MergeSettings, said)
        from vox_core.run.merge import merge as run_merge

        return run_merge(os.fspath(run), chosen, observe=observe, progress=transfer)


@in_python
def open_trainer(
    model: Reference | None = None,
    *,
    config: Reference | None = None,
    on_event: OnEvent | None = None,
    progress: bool = False,
    **settings: Unpack[Trainer],
) -> OpenTrainer:
    """Load a model to train in a loop of your own; close it with `with` or `close()`.

        with vox.open_trainer("smollm2-135m", rank=16) as trainer:
            trainer.forward_backward(rows)
            trainer.optim_step(lr=1e-4)

    Args:
        settings: keys of `[train]` that concern model, backend, adapter and optimizer.

    Raises:
        InputError: the model cannot be had, or no installed backend can train it.
    """
    from vox_core.run import open_trainer as own

    said = _keywords(TrainSettings, {"model": model, **settings})
    if unused := [name for name in said if name not in own.SETTINGS]:
        raise ConfigError(
            "C001",
            "a loop of your own does not have these settings",
            where="vox.open_trainer",
            found=", ".join(unused),
            expected=", ".join(own.SETTINGS),
            remedy="leave them out: data, steps and files are your loop's",
        )
    with reading(config), _receivers(on_event, progress) as (observe, transfer):
        chosen = read_settings(TrainSettings, said)
        return own.open_trainer(chosen, observe=observe, progress=transfer)


@in_python
def load(
    reference: Reference,
    *,
    section: Literal["generate", "chat"] = "generate",
    config: Reference | None = None,
    on_event: OnEvent | None = None,
    progress: bool = False,
    **settings: Unpack[Load],
) -> Model:
    """Load a run or a model; close it with `with` or `close()`.

    Args:
        section: section of `vox.toml` that the settings belong to.
        settings: keys of that section; sampling settings apply to every answer.

    Raises:
        InputError: it cannot be found, or no installed backend can load it.
    """
    kind = ChatSettings if section == "chat" else GenerateSettings
    said = _keywords(kind, settings)
    stack = ExitStack()
    with reading(config), _receivers(on_event, progress) as (observe, transfer):
        chosen = read_settings(kind, said)
        from vox_core.run.load import open_model

        opening = open_model(os.fspath(reference), chosen, observe=observe, progress=transfer)
        return Model(stack.enter_context(opening), stack.close, chosen, said, config)


class Model:
    """A loaded model; keywords of a call are sampling settings for that answer alone.

    Attributes:
        title: the base model, and whether it has an adapter.
        close: frees the memory; a second call does nothing.
    """

    def __init__(
        self,
        opened: OpenModel,
        close: Callable[[], None],
        settings: SamplingSettings,
        said: Mapping[str, Any],
        config: Reference | None,
    ) -> None:
        self.title = opened.title
        self.close = close
        self._opened, self._settings, self._said, self._config = opened, settings, said, config

    @in_python
    def chat(self, messages: Messages, **sampling: Unpack[Sampling]) -> str:
        """Answer a message or a conversation, with the sampling settings of `[chat]`.

        Raises:
            DataError: the chat template refuses the conversation, or it is too long.
        """
        return "".join(self._answer(ChatSettings, messages, 0, sampling))

    @overload
    def generate(self, prompts: str, **sampling: Unpack[Sampling]) -> str: ...  # type: ignore[overload-overlap]  # a text is a sequence of texts
    @overload
    def generate(self, prompts: Sequence[Message], **sampling: Unpack[Sampling]) -> str: ...
    @overload
    def generate(self, prompts: Iterable[Messages], **sampling: Unpack[Sampling]) -> list[str]: ...

    @in_python
    def generate(self, prompts: Any, **sampling: Any) -> str | list[str]:
        """Answer a prompt or a conversation, or many of them at once, with the sampling settings of
        `[generate]`; greedy by default.

        Raises:
            DataError: the chat template refuses a prompt, or it is too long.
        """
        if "n" in sampling:
            what, remedy = "generate gives one answer to a prompt", "call answers(prompts, n=2)"
            raise ConfigError("C002", what, where="n", found=sampling["n"], remedy=remedy)
        one = isinstance(prompts, str | Mapping)
        one |= isinstance(prompts, Sequence) and any(isinstance(each, Mapping) for each in prompts)
        answers = self.answers([prompts] if one else prompts, n=1, **sampling)
        return next(answers).answer if one else [each.answer for each in answers]

    def answers(
        self,
        prompts: Iterable[Messages],
        *,
        out: Reference | None = None,
        on_event: OnEvent | None = None,
        progress: bool = False,
        **sampling: Unpack[Answers],
    ) -> Iterator[Answered]:
        """Answer many prompts at once, and yield the answers in order, with token counts.

        Args:
            out: JSONL file to append the answers to. The answers that it has are not generated
                again: an interrupted call is continued by the same call.
            sampling: settings of `[generate]`; `n` answers to each prompt.

        Raises:
            DataError: the chat template refuses a prompt, or it is too long.
            OutputError: `out` has answers to other prompts, or of other settings.
        """
        from vox_core.run.answers import answer_all

        with keywords_named("Model.answers"), _receivers(on_event, progress) as (observe, _):
            settings = self._changed(GenerateSettings, sampling)
            asked = [_conversation(each) for each in prompts]
            path = None if out is None else Path(out)
            yield from answer_all(
                self._opened, asked, settings, n=settings.n, out=path, observe=observe
            )

    @in_python
    def stream(self, messages: Messages, *, row: int = 0, **sampling: Unpack[Sampling]) -> Answer:
        """Yield an answer in pieces as they are generated, with token counts.

        Args:
            row: index of the answer; each row samples a different one, unless decoding is greedy.
        """
        answer = self._answer(type(self._settings), messages, row, sampling)
        answer.model = self
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self,
        kind: type[SamplingSettings],
        messages: Messages,
        row: int,
        sampling: Mapping[str, Any],
    ) -> Answer:
        return self._opened.reply(_conversation(messages), row, self._changed(kind, sampling))

    def _changed(self, kind: type[S], sampling: Mapping[str, Any]) -> S:
        """Return the settings of an answer."""
        if not sampling and type(self._settings) is kind:
            return self._settings
        changed = _keywords(kind, sampling, loaded=True)
        kept = {name: each for name, each in self._said.items() if name in kind.model_fields}
        with reading(self._config):
            return read_settings(kind, {**kept, **changed})


def _conversation(messages: Messages) -> Sequence[Mapping[str, str]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


@in_python
def runs(folder: Reference = "runs") -> list[Summary]:
    """List every run in a folder by name: status, model, losses, checkpoints.

    Raises:
        AdapterError: there is no such folder.
    """
    from vox_core.run.telemetry import read_runs

    return read_runs(Path(folder))


# --- settings and events --------------------------------------------------------------------------


def _keywords(kind: type[Section], said: Mapping[str, Any], loaded: bool = False) -> dict[str, Any]:
    """Validate the names of a call's keywords; convert values to those of `vox.toml`."""
    require_keywords(kind, said, loaded=loaded)
    files = {name: _stored(said[name]) for name in ("data", "valid") if name in said}
    return {name: _plain(value) for name, value in given({**said, **files}).items()}


def _stored(data: Data | None) -> Any:
    """Copy rows to the cache, and return the path; files stay what they are."""
    if isinstance(data, str | bytes | os.PathLike) or not isinstance(data, Iterable):
        return data
    first = list(islice(rows := iter(data), 1))
    # The keys of a mapping, and the columns of a data frame, are texts, too.
    if isinstance(next(iter(first), ""), str | os.PathLike) and not hasattr(data, "keys"):
        return (*first, *rows)
    from vox_core.data.formats import keep_rows, lines_of

    return keep_rows(lines_of(chain(first, rows)), "rows")


def _plain(value: Any) -> Any:
    """Convert paths, numbers and arrays of NumPy or torch, and collections to plain values."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    value = sorted(value, key=str) if isinstance(value, set | frozenset) else value
    return tuple(map(_plain, value)) if isinstance(value, list | tuple | Iterator) else value


@contextmanager
def _receivers(
    on_event: OnEvent | None, progress: bool
) -> Iterator[tuple[OnEvent, Progress | None]]:
    """Combine the caller's callback with a progress display."""
    with display() if progress else nullcontext() as shown:

        def observe(event: Event) -> None:
            if isinstance(event, Notice):
                event = replace(event, message=as_keywords(event.message))
            for show in (shown and shown.observe, on_event):
                if show:
                    show(event)

        yield observe, shown.transfer if shown else None
