"""Steps that learn from the model's own answers.

In several processes each samples every answer, since sampling is a function of the seed; each
answer is judged in one of them.

The prompts of a step are sampled from the trainer itself, under the learner's name, so that no
second copy of the model can lag behind. Each answer's log-probabilities are kept as they were
sampled; before an update they are compared with what the trainer computes for the same tokens, and
a run whose rollouts come from another model stops (T005).

Prompts, order and random numbers are functions of seed and step, so a run that was killed while it
sampled samples the same again. With several updates on the same answers it resumes where they were
sampled.

    rollouts.jsonl    {"step", "file", "line", "prompt", "answer", "reward", "tokens", "ended",
                      "rewards": {NAME: number, or null where it says nothing}}

Shape legend: N answers, R rewards, T tokens of a batch, K tokens of an answer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vox_core import files
from vox_core.contract import Batch, Doubles, DType, Floats, Place, Step, Trainer, Validation, World
from vox_core.data.batching import StepBatches, documents_of_step, grouped, to_batch
from vox_core.data.encode import Document
from vox_core.data.formats import place_of
from vox_core.data.tokenizer import end_of_turn_ids, load_tokenizer
from vox_core.errors import TrainingError, command
from vox_core.host.load import format_raised
from vox_core.run.folder import ROLLOUTS
from vox_core.run.generate import Generator, Prompt, most_rows
from vox_core.run.learner import NAME, Learner, require_same
from vox_core.run.plan import positions
from vox_core.run.sampling import Sampling
from vox_core.run.weighing import total_weight

if TYPE_CHECKING:
    from pathlib import Path

    from vox_core.data.dataset import Dataset
    from vox_core.run.run_plan import RunPlan

APART: Mapping[DType, float] = {"fp32": 1e-4, "bf16": 0.15, "fp16": 0.15}
"""Greatest mean distance, in nats, between log-probabilities as sampled and as computed for
training: with a cache and without, in batches of other shapes. SmolLM2 was seen at 2e-6 in float32
and, while its answers had an entropy of 1.9 nats per token, 0.056 in bfloat16."""


Scorer: TypeAlias = "Callable[[Batch], Floats]"
"""From a batch to its log-probabilities, (T,), by the model that the learner is compared with."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A sampled answer.

    Args:
        prompt: index of its document.
        document: the answer behind its prompt.
        log_probs_K: float32, of the answer's tokens, as sampled.
    """

    prompt: int
    document: Document
    log_probs_K: Floats
    text: str

    @property
    def place(self) -> tuple[Path, int]:
        """File and line of the prompt."""
        return self.document.source, self.document.line


class Rollouts:
    """Makes the steps of a run that learns from its own answers."""

    def __init__(
        self,
        plan: RunPlan,
        trainer: Trainer,
        reference: Scorer | None = None,
        world: World = World(),  # noqa: B008 (frozen)
    ) -> None:
        self._plan, self._trainer, self._reference = plan, trainer, reference
        self._world = world
        self._rewards = {source.name: reward for source, reward in plan.inputs.rewards}
        self._weights_R = np.array([source.weight for source, _ in plan.inputs.rewards])
        self._tokenizer = load_tokenizer(plan.inputs.model.tokenizer)
        self._ends = end_of_turn_ids(self._tokenizer)
        rows = plan.inputs.rows
        used = (*rows.train, *rows.valid)
        self._rows = {(file.path, line): row for file in used for line, row in file.parsed()}
        self._positions = positions(plan.inputs.config) or sys.maxsize
        # How many rows at once decides the last bits, so it does not go by the memory that is free.
        self._generator = Generator(trainer, most_rows(plan.inputs.selection.hardware))
        self._sampled: StepBatches | None = None
        self.metrics: Mapping[str, float] = {}

    def batches(self, number: int) -> StepBatches:
        """Sample and judge the answers of step `number`, or return those it updates on again."""
        made, contract, data = self._plan.settings, self._plan.contract, self._plan.data.train
        turn, again = divmod(number - 1, made.updates)
        if again:
            assert self._sampled is not None, "a run resumes where its answers were sampled"
            return self._sampled
        chosen = documents_of_step(
            data.groups, contract.batch_size, contract.seed, turn + 1, data.ordering
        )
        answers = self._sample(
            data, chosen.tolist(), turn + 1, made.rollouts, made.rollout_temperature
        )
        judged = self._judged(answers)
        self._record(number, answers, judged)
        self._sampled = self._placed(answers, judged[0])
        return self._sampled

    def validation(self, learner: Learner) -> Validation:
        """Measure one greedy answer to each validation prompt. The loss is the negative mean
        reward; with a teacher, how much less likely than the model the teacher finds a token, in
        nats."""
        valid = self._plan.data.valid
        assert valid is not None
        answers = self._sample(valid, range(len(valid)), 0, 1, 0.0)
        if self._rewards or self._reference is None:
            rewards_N, _ = self._judged(answers)
            mean = float(np.mean(rewards_N))
            return Validation(learner.step, -mean, mean, margin(rewards_N))
        apart = total = 0.0
        for answer in answers:
            batch = to_batch([answer.document])
            scores_K = self._reference(batch)[batch.weights_T != 0]
            apart += float((answer.log_probs_K - scores_K).sum(dtype=np.float64))
            total += len(scores_K)
        return Validation(learner.step, apart / total)

    def _sample(
        self, data: Dataset, documents: Sequence[int], turn: int, count: int, temperature: float
    ) -> list[Rollout]:
        prompts = []
        for place, document in enumerate(documents):
            prompt = data[document].tokens_T.tolist()
            room = min(self._plan.settings.rollout_tokens, self._positions - len(prompt))
            first = Sampling(room, temperature, seed=self._plan.contract.seed)
            start = (turn * len(documents) + place) * count
            sampled = (replace(first, row=row) for row in range(start, start + count))
            prompts += [Prompt(prompt, each, self._ends.__contains__, NAME) for each in sampled]
        found = dict[int, Rollout]()
        for row, tokens in self._generator.complete(prompts, log_probs=True):
            answer, document = [token.id for token in tokens], documents[row // count]
            log_probs_K = np.array([token.log_prob for token in tokens], np.float32)
            text = str(self._tokenizer.decode(answer, skip_special_tokens=True))
            found[row] = Rollout(document, behind(data[document], answer), log_probs_K, text)
        return [found[row] for row in range(len(prompts))]

    def _judged(self, answers: Sequence[Rollout]) -> tuple[Doubles, Doubles]:
        """Judge the answers, those to a prompt in one process: a reward need not be a function of
        its answers.

        Returns:
            (N,) float64, the weighted sums, and (N, R) float64, NaN where a reward says nothing.
        """
        tokens = [answer.document.tokens_T.tolist() for answer in answers]
        require_same(self._trainer, self._world, lambda: {"sampled answers": json.dumps(tokens)})
        rewards_NR = np.zeros((len(answers), len(self._rewards)))
        prompts = [*dict.fromkeys(answer.prompt for answer in answers)]
        own = {*prompts[self._world.rank :: self._world.size]}
        mine = [n for n, answer in enumerate(answers) if answer.prompt in own]
        asked = [(answers[n].place, answers[n].text) for n in mine]
        for column, name in enumerate(self._rewards if mine else ()):
            rewards_NR[mine, column] = self._judge(name, asked)
        for number, (place, text) in zip(mine, asked, strict=True):
            if self._rewards and np.isnan(rewards_NR[number]).all():
                raise self._unjudged(place, text, "every reward returned None")
        rewards_NR = self._trainer.share(rewards_NR.ravel()).reshape(rewards_NR.shape)
        return np.nansum(rewards_NR * self._weights_R, axis=1), rewards_NR

    def _judge(self, name: str, asked: Sequence[tuple[tuple[Path, int], str]]) -> list[float]:
        """Return what a reward says of answers to rows (T004 if one cannot be judged)."""
        values, judged, cause = list[float](), None, None
        try:
            rows, texts = [self._rows[place] for place, _ in asked], [text for _, text in asked]
            judged = self._rewards[name].judge_all(rows, texts)
            for value in judged:
                values.append(_number(value))
            if len(values) == len(asked):
                return values
            fault = f"{len(values)} rewards of {len(asked)} answers"
        except Exception as error:  # noqa: BLE001 (a reward may raise anything)
            told, cause = isinstance(error, ValueError), error
            fault = str(error) if told else format_raised(error)
        if judged is None and len(asked) > 1:
            fault += f", of {len(asked)} answers at once; this is the first"
        raise self._unjudged(*asked[: len(values) + 1][-1], f"{name}: {fault}") from cause

    def _unjudged(self, place: tuple[Path, int], answer: str, fault: str) -> TrainingError:
        return TrainingError(
            "T004",
            "an answer cannot be judged",
            where=place_of(*place),
            found=f"{fault}; the answer begins {answer[:60]!r}",
            remedy="correct the reward (--debug shows the traceback), then "
            + command("vox", "train", "--resume", self._plan.run.path, "--allow-change", "reward")
            + "; with other rows train again, with another --out",
        )

    def _placed(self, answers: Sequence[Rollout], rewards_N: Doubles) -> StepBatches:
        made, count = self._plan.execution, self._plan.settings.rollouts
        places: list[Place] = [None] * len(answers)  # type: ignore[list-item]
        batches = []
        lengths = [len(answer.document) for answer in answers]
        for number, pack in enumerate(grouped(lengths, made.micro_batch_tokens, made.packing)):
            batch = to_batch([answers[index].document for index in pack])
            batches.append(batch)
            scores_T = self._reference(batch) if self._reference else None
            for index, extent in zip(pack, batch.documents(), strict=True):
                trained_T = batch.weights_T[extent] != 0
                places[index] = Place(
                    "rollout",
                    number,
                    extent,
                    None if scores_T is None else scores_T[extent][trained_T],
                    answers[index].log_probs_K,
                    float(rewards_N[index]),
                )
        groups = (tuple(places[at : at + count]) for at in range(0, len(places), count))
        return tuple(batches), total_weight(batches), tuple(groups)

    def _record(
        self, step: int, answers: Sequence[Rollout], rewards: tuple[Doubles, Doubles]
    ) -> None:
        rewards_N, rewards_NR = rewards
        if self._rewards:
            means = {"reward": rewards_N.mean()}
            for name, values_N in zip(self._rewards, rewards_NR.T, strict=True):
                if len(judged_N := values_N[~np.isnan(values_N)]):
                    means[f"rewards/{name}/mean"] = judged_N.mean()
            self.metrics = {name: float(mean) for name, mean in means.items()}
        lines = []
        for index, answer in enumerate(answers):
            path, line = answer.place
            values = {"step": step, "file": str(path.absolute()), "line": line}
            tokens, count = answer.document.tokens_T.tolist(), len(answer.log_probs_K)
            values |= {"prompt": self._tokenizer.decode(tokens[:-count])}
            judged = zip(self._rewards, rewards_NR[index].tolist(), strict=True)
            told = {name: None if math.isnan(each) else each for name, each in judged}
            values |= {"answer": answer.text, "reward": rewards_N[index], "rewards": told}
            lines.append({**values, "tokens": count, "ended": tokens[-1] in self._ends})
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        if self._world.leads:
            files.append(self._plan.run.path / ROLLOUTS, text.encode())


def _number(reward: float | None) -> float:
    """Return a reward as a float, NaN for None; ValueError if it is no finite number."""
    if reward is None:
        return math.nan
    if not math.isfinite(found := float(reward)):
        raise ValueError(f"a reward of {found}")
    return found


def margin(rewards_N: Doubles) -> float | None:
    """Return half the width of the mean's 95 % interval, by the normal approximation."""
    if len(rewards_N) < 2:
        return None
    return float(1.96 * np.std(rewards_N, ddof=1) / math.sqrt(len(rewards_N)))


def behind(prompt: Document, answer: Sequence[int]) -> Document:
    """Lay the tokens of an answer behind its prompt; they are trained."""
    tokens_T = np.concatenate([prompt.tokens_T, np.array(answer, np.int32)])
    weights_T = np.repeat(np.array([0, 1], np.float32), [len(prompt), len(answer)])
    return replace(prompt, tokens_T=tokens_T, weights_T=weights_T)


def take_old_log_probs(step: Step, log_probs: Sequence[Floats], dtype: DType, updates: int) -> None:
    """Let the trainer's log-probabilities of new answers be the old ones of objectives, in place.

    Those of sampling are rounded otherwise. That is no change of the model, but in bfloat16 would
    be clipped, by the narrow clips of GSPO almost everywhere. Later updates on the same answers
    compare with the same old ones.

    Raises:
        TrainingError: T005, the answers were sampled from another model.
    """
    if (step.number - 1) % updates:
        return
    distances = []
    for place in (place for group in step.groups for place in group):
        trained_T = step.batches[place.batch].weights_T[place.extent] != 0
        assert place.sampled_K is not None
        found_K = log_probs[place.batch][place.extent][trained_T]
        distances.append(np.abs(found_K - place.sampled_K))
        place.sampled_K[:] = found_K
    apart = float(np.concatenate(distances).mean())
    if not apart <= APART[dtype]:
        raise TrainingError(
            "T005",
            "the answers were not sampled from the model that is trained",
            where=f"step {step.number}",
            found=f"log-probabilities {apart:.2g} nats apart, on average",
            expected=f"at most {APART[dtype]:g} in {dtype}",
            remedy="report it to the backend's authors; the run can be resumed on another backend",
        )
