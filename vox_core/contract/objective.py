"""Objectives: what a step minimises, as a pure function of log-probabilities.

A loss L that depends on the model through log-probabilities l_t of tokens has the gradient
`sum_t (dL/dl_t) * grad l_t`, which is what `Trainer.accumulate` computes for the weights
`w_t = -dL/dl_t`. So an objective is numpy, written once for every backend.

Shape legend: K trained positions of a document, M targets of a position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from vox_core.contract.batch import Floats

Need: TypeAlias = Literal["reference", "teacher", "rollouts", "rewards", "mismatched"]
"""Log-probabilities of the model that training starts from, or of a teacher (`Side.reference_K`);
rollouts of the model that learns, and their rewards; for each row, further documents of its prompt
with an answer of another row."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Log-probabilities and reward of a document at its K trained positions. With `Objective.top_k`
    they are (K, M): of the teacher's M most likely tokens, in its order.

    Args:
        label: the name that `examples` gave it, such as `chosen`; `rollout` for sampled ones.
        log_probs_K: float32, of the model that learns, as it is now.
        reference_K: float32, of the reference model; None unless needed.
        sampled_K: float32, when it was sampled; None unless it was.
        reward: of a rollout.
    """

    label: str
    log_probs_K: Floats
    reference_K: Floats | None = None
    sampled_K: Floats | None = None
    reward: float = 0.0


Group: TypeAlias = Sequence[Side]
"""The documents of one row, in the order of `examples`; or the rollouts of one prompt."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over a whole step: all calls of `weigh`, all ranks.

    Args:
        groups: number of groups.
        documents: label -> number of documents.
        tokens: label -> number of trained positions.
    """

    groups: int
    documents: Mapping[str, int]
    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """The result of `weigh`.

    Args:
        loss: the groups' share of the step's loss; a step's loss is the sum over its calls.
        weights: for each side of each group, `-d loss / d log_probs_K`, float32, of its shape.
        metrics: name -> mean over the groups.
        counts: name -> number of values in the mean, for metrics that not every group has one of.
    """

    loss: float
    weights: Sequence[Sequence[Floats]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


class Reward(ABC):
    """Judges the answers of a model that learns from its own.

    Attributes:
        reads_answer: a row that does not end with an answer is malformed.
        fields: that a row must have.
    """

    reads_answer: bool = True
    fields: Collection[str] = ()

    @abstractmethod
    def judge(self, row: Mapping[str, object], answer: str) -> float | None:
        """Return a finite number, higher for a better answer; None leaves it to other rewards.

        Args:
            row: what the answer is to, as in its data file.

        Raises:
            ValueError: why it cannot be judged, in words for the user.
        """

    def judge_all(
        self, rows: Sequence[Mapping[str, object]], answers: Sequence[str]
    ) -> Iterable[float | None]:
        """Judge the answers of a step, those to one prompt side by side.

        Override it to compare them, or to ask a server once.
        """
        return map(self.judge, rows, answers)

    def close(self) -> None:  # noqa: B027 (a reward without processes has nothing to end)
        """End what was started."""


class Objective(ABC):
    """Loss of a step, as weights of its tokens' log-probabilities.

    Attributes:
        options_of_examples: names of the options that decide `needs` or the documents of a row;
            tokens in the cache serve all values of the others. None: all options.
        foreign: whether an exception of `weigh` is reported as a plugin's.
    """

    options_of_examples: ClassVar[Collection[str] | None] = None
    foreign: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs of `weigh` besides the documents' log-probabilities."""
        return frozenset()

    @property
    def top_k(self) -> int:
        """With a teacher and documents: the number of targets at each trained position, the
        teacher's most likely tokens. 0: the document's own token."""
        return 0

    @property
    def separable(self) -> bool:
        """Whether `weigh` may be called with some of a step's groups at a time; otherwise it is
        called once for each step."""
        return True

    @property
    def min_rollouts(self) -> int:
        """Fewest rollouts of a prompt from which something is learnt."""
        return 1

    def examples(self, row: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
        """Return the documents of a row: label -> a row as supervised training takes it.

        Raises:
            ValueError: what the row lacks, in words for the user.
        """
        raise NotImplementedError(f"{type(self).__name__} learns from rollouts, not from documents")

    def mismatched(
        self, row: Mapping[str, object], other: Mapping[str, object]
    ) -> Mapping[str, Mapping[str, object]]:
        """Return further documents of a row: its prompt with the answer of another row. They follow
        those of `examples` in its group. Called if `needs` has `mismatched`; the rows may come in
        any order that gives each row another one."""
        raise NotImplementedError(f"{type(self).__name__} needs no mismatched documents")

    @abstractmethod
    def weigh(self, groups: Sequence[Group], totals: Totals) -> Weighed:
        """Return loss and weights of some groups of a step, or of all."""
