"""`vox.open_trainer`: gradients, steps, scores and samples of a loop of one's own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest

import vox_core as vox
from tests.core.data_samples import encode_one
from tests.run.bigram import HEAD, Bigram
from tests.run.conftest import TALK
from vox_core.contract import Notice, Objective, OptimizerSpec, Side, Step, Weighed
from vox_core.data.batching import to_batch
from vox_core.data.encode import Encoder
from vox_core.data.rows import parse_row
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import (
    AdapterError,
    BackendError,
    ConfigError,
    DataError,
    OutputError,
    PlanError,
    VoxError,
)
from vox_core.run.learner import Learner
from vox_testing.llama import write_llama

ROWS = [{"prompt": question, "completion": answer} for question, answer in TALK]
PAIRS = [
    {"prompt": question, "chosen": answer, "rejected": answer[::-1]} for question, answer in TALK
]
SETTINGS = {"dtype": "fp32", "rank": 4, "alpha": 8, "targets": HEAD, "lr": 1e-2, "clip": 0}


class Margin(Objective):
    """Raises the chosen answers' log-probabilities above the rejected ones', from the reference."""

    needs = frozenset({"reference"})

    def __init__(self) -> None:
        self.seen: list[list[Side]] = []

    def examples(self, row):
        if "chosen" not in row:
            raise ValueError("no chosen answer")
        return {
            label: {"prompt": row["prompt"], "completion": row[label]}
            for label in ("chosen", "rejected")
        }

    def weigh(self, groups, totals):
        self.seen += groups
        sign = {"chosen": 1, "rejected": -1}
        weights = [
            [np.full(len(s.log_probs_K), sign[s.label] / totals.groups, np.float32) for s in group]
            for group in groups
        ]
        loss = -sum(
            float(np.dot(w, s.log_probs_K - s.reference_K))
            for group, of_group in zip(groups, weights, strict=True)
            for s, w in zip(group, of_group, strict=True)
        )
        return Weighed(loss, weights, {"margin": -loss})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture
def trainer(base: Path, bigrams: list[Bigram]):
    with vox.open_trainer(base, **SETTINGS) as opened:
        yield opened


def tensors(opened) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in opened.state.adapter.tensors().items()}


def whole(base: Path) -> list:
    encoder = Encoder(load_tokenizer(base), 2048)
    return [encode_one(encoder, parse_row(dict(row))).documents[0] for row in ROWS]


def test_a_supervised_step_is_that_of_a_run(trainer, base: Path) -> None:
    model = Bigram(base)
    learner = Learner(
        model, trainer.state, OptimizerSpec(1e-2, "constant", 0, 0, 0), seed=42, name="adapter"
    )
    batch = to_batch(sorted(whole(base), key=len, reverse=True))
    losses = []
    for number in (1, 2, 3):
        done = learner.take(Step(number, (batch,), float(batch.weights_T.sum()), 1e-2))
        found = trainer.forward_backward(ROWS)
        norm = trainer.optim_step()
        assert found.loss == pytest.approx(done.loss, rel=1e-7), "sums of float32, in another order"
        assert norm == pytest.approx(done.grad_norm, rel=1e-6)
        losses.append(found.loss)
    assert losses[0] > losses[1] > losses[2]
    assert trainer.step == trainer.state.step == 3
    for name, value in trainer.state.adapter.tensors().items():
        np.testing.assert_allclose(value, learner.state().adapter.tensors()[name], atol=1e-7)


def test_gradients_add_up_until_the_step(base: Path, bigrams: list[Bigram]) -> None:
    with vox.open_trainer(base, **SETTINGS) as one, vox.open_trainer(base, **SETTINGS) as two:
        one.forward_backward(ROWS)
        two.forward_backward(ROWS[:2])
        two.forward_backward(ROWS[2:])
        assert one.optim_step() == pytest.approx(two.optim_step(), rel=1e-9)  # float64 inside
        for name, value in one.state.adapter.tensors().items():
            np.testing.assert_allclose(value, two.state.adapter.tensors()[name], atol=1e-7)
    assert all(each.closed for each in bigrams)


@pytest.mark.parametrize("last", [-1.0, -3.0])
def test_supervised_weights_that_add_up_to_nothing_are_refused(trainer, last: float) -> None:
    """They would be divided by zero, or train in the other direction."""
    with pytest.raises(ConfigError, match="divided by the sum") as caught:
        trainer.forward_backward([vox.Document([5, 6, 7], [0.0, 1.0, last])])
    assert caught.value.found == f"documents whose weights add up to {1 + last:g}"
    with pytest.raises(ConfigError, match="no gradients"):
        trainer.optim_step()
    assert trainer.forward_backward([vox.Document([5, 6, 7], [0.0, 3.0, -1.0])]).loss


def test_weights_are_those_of_the_log_probs(trainer, bigrams: list[Bigram]) -> None:
    (model,) = bigrams
    factors = [1.0, 0.0, -2.0]
    found = trainer.forward_backward(ROWS[:3], weights=factors)
    sums = [float(scores_K.sum()) for scores_K in found.log_probs]
    assert found.loss == pytest.approx(-np.dot(factors, sums), rel=1e-6)
    by_factor = model.gradients["adapter"].copy()
    trainer.optim_step(lr=0.0)
    logs = trainer.log_probs(ROWS[:3])
    for scores_K, of_call_K in zip(logs, found.log_probs, strict=True):
        np.testing.assert_array_equal(scores_K, of_call_K)
    each = [np.full(len(scores_K), factor) for scores_K, factor in zip(logs, factors, strict=True)]
    trainer.forward_backward(ROWS[:3], weights=each)
    np.testing.assert_array_equal(model.gradients["adapter"], by_factor)
    trainer.optim_step(lr=0.0)
    again = trainer.forward_backward(
        ROWS[:3], lambda scores: [s * 0 + f for s, f in zip(scores, factors, strict=True)]
    )
    np.testing.assert_allclose(model.gradients["adapter"], by_factor, rtol=1e-12)
    assert again.loss == pytest.approx(found.loss, rel=1e-6)
    assert [len(scores_K) for scores_K in again.log_probs] == [len(s) for s in logs]


def test_weights_without_anything_to_learn_change_nothing(trainer) -> None:
    before = tensors(trainer)
    found = trainer.forward_backward(ROWS, weights=[0.0] * len(ROWS))
    assert (found.loss, trainer.optim_step()) == (0, 0)
    assert tensors(trainer) == before


def test_the_divisor_follows_from_what_was_accumulated(trainer, bigrams) -> None:
    (model,) = bigrams
    seen = []
    model.update = lambda update, _: seen.append(update) or 1.0
    trainer.forward_backward(ROWS[:1])
    trainer.forward_backward(ROWS[1:3])
    trainer.optim_step(lr=0.5, weight_decay=0.1, clip=2.0, betas=(0.5, 0.75), eps=1e-3)
    trainer.forward_backward(ROWS[:1], weights=[3.0])
    trainer.optim_step()
    trainer.forward_backward(ROWS[:1])
    trainer.forward_backward(ROWS[:1], weights=[3.0])
    with pytest.raises(ConfigError, match="total_weight"):
        trainer.optim_step()
    trainer.optim_step(total_weight=7)
    trained = sum(len(scores_K) for scores_K in trainer.log_probs(ROWS[:3]))
    assert [update.total_weight for update in seen] == [trained, 1, 7]
    first = seen[0]
    assert (first.lr, first.weight_decay, first.clip) == (0.5, 0.1, 2.0)
    assert (first.beta1, first.beta2, first.eps) == (0.5, 0.75, 1e-3)
    assert [update.number for update in seen] == [1, 2, 3]
    with pytest.raises(ConfigError, match="no gradients"):
        trainer.optim_step()


@pytest.mark.parametrize(
    "given",
    [
        {"lr": np.nan}, {"lr": np.inf}, {"lr": -1.0}, {"clip": -1.0}, {"weight_decay": np.nan},
        {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": 0.0}, {"eps": 1e-46},
        {"eps": np.nan}, {"total_weight": 0}, {"total_weight": -1},
    ],
)  # fmt: skip
def test_a_step_with_numbers_out_of_range_is_refused(trainer, given) -> None:
    trainer.forward_backward(ROWS)
    before = tensors(trainer)
    with pytest.raises(ConfigError, match=f"step with {next(iter(given))[:4]}"):
        trainer.optim_step(**given)
    assert tensors(trainer) == before
    assert trainer.optim_step() > 0, "the gradients are still there"


def test_an_objective_has_groups_and_the_reference(trainer) -> None:
    objective = Margin()
    first = trainer.forward_backward(PAIRS, objective)
    assert first.loss == 0, "the reference is the base, which the adapter begins with"
    assert [[side.label for side in group] for group in objective.seen] == [
        ["chosen", "rejected"]
    ] * len(PAIRS)
    assert len(first.log_probs) == 2 * len(PAIRS)
    assert first.log_probs[1] is not None and trainer.optim_step() > 0
    assert trainer.forward_backward(PAIRS, objective).metrics["margin"] > 0


def test_a_starting_adapter_is_the_reference(trainer, base: Path, tmp_path: Path, bigrams) -> None:
    trainer.forward_backward(ROWS)
    trainer.optim_step()
    saved = trainer.save(tmp_path / "saved")
    with vox.open_trainer(adapter=saved, dtype="fp32", lr=1e-2) as second:
        assert tensors(second) == tensors(trainer)
        assert second.state.adapter.modules[HEAD].rank == 4
        objective = Margin()
        assert second.forward_backward(PAIRS, objective).loss == 0
        second.optim_step()
        assert second.forward_backward(PAIRS, objective).loss < 0
    with pytest.raises(ConfigError, match="`rank` 8"), vox.open_trainer(adapter=saved, rank=8):
        pass


def test_samples_have_the_log_probs_of_the_model(trainer) -> None:
    trainer.forward_backward(ROWS)
    trainer.optim_step()
    samples = trainer.sample(["Stop?", "Talk?"], n=3, max_tokens=6, seed=1)
    assert len({sample.text for sample in samples}) > 3
    assert len({sample.group for sample in samples[:3]}) == 1
    assert len({sample.group for sample in samples}) == 2
    scored = trainer.log_probs(samples)
    for sample, scores_K in zip(samples, scored, strict=True):
        # Both are float32 of a float64 log-softmax of the same float32 logits.
        np.testing.assert_allclose(sample.log_probs, scores_K, atol=1e-6)
    of_base = trainer.log_probs(samples, base=True)
    assert not np.allclose(scored[0], of_base[0])
    again = trainer.sample(["Stop?", "Talk?"], n=3, max_tokens=6, seed=1)
    assert [each.text for each in again] == [each.text for each in samples]
    one, two = trainer.sample("Talk?", max_tokens=8), trainer.sample("Talk?", max_tokens=8)
    assert one[0].text != two[0].text, "each call has random numbers of its own"
    assert one[0].group != two[0].group
    greedy = trainer.sample("Talk?", max_tokens=4, temperature=0)
    assert greedy[0].text == trainer.sample("Talk?", max_tokens=4, temperature=0)[0].text
    assert trainer.sample("Talk?", max_tokens=4, temperature=0, base=True)[0].text


def test_prompts_may_come_once_and_settings_of_the_model_are_refused(trainer) -> None:
    samples = trainer.sample((each for each in ("a", "b")), n=np.int64(2), max_tokens=2)
    assert [sample.group for sample in samples] == [0, 0, 1, 1]
    cases = [
        ({"n": 0}, "n = 0: input should be greater than 0"),
        ({"backend": "mlx"}, "a loaded model keeps"),
        ({"adapter": "none"}, "a loaded model keeps"),
        ({"max_new_tokens": 2}, "did you mean max_tokens?"),
    ]
    for arguments, said in cases:
        with pytest.raises(ConfigError) as caught:
            trainer.sample("a", **arguments)
        assert said in str(caught.value), arguments
    with pytest.raises(DataError, match='an object as "messages", expected a list'):
        trainer.sample([{"role": "user", "content": "a"}])


def test_rollouts_reach_an_objective_with_their_rewards(trainer) -> None:
    seen = []

    class Policy(Objective):
        needs = frozenset({"rollouts"})

        def weigh(self, groups, totals):
            seen.extend(groups)
            return Weighed(0.0, [[0 * side.log_probs_K for side in group] for group in groups])

    samples = [*trainer.sample("Talk?", n=2, max_tokens=3), *trainer.sample("Talk?", max_tokens=3)]
    trainer.forward_backward(samples, Policy(), rewards=[1.0, 2.0, 3.0])
    assert [[side.reward for side in group] for group in seen] == [[1.0, 2.0], [3.0]]
    assert {side.label for group in seen for side in group} == {"rollout"}
    for group in seen:
        for side in group:
            np.testing.assert_allclose(side.sampled_K, side.log_probs_K, atol=1e-6)
    with pytest.raises(ConfigError, match="reward"):
        trainer.forward_backward(samples, Policy())
    with pytest.raises(ConfigError, match="rollouts"):
        trainer.forward_backward(ROWS, Policy(), rewards=[1.0] * len(ROWS))
    with pytest.raises(ConfigError) as caught:
        trainer.forward_backward(ROWS, "dpo", weights=[1.0] * len(ROWS))
    assert caught.value.remedy == "leave out weights, or the objective"


def test_documents_are_trained_where_they_have_weight(trainer, bigrams) -> None:
    (model,) = bigrams
    document = vox.Document([5, 6, 7, 8], [1, 0, 2.5, 0])
    (scores_K,) = trainer.forward_backward([document]).log_probs
    assert model.accumulated[-1].weights_T.tolist() == [0, 2.5, 0, 0]
    assert len(scores_K) == 1
    assert len(trainer.log_probs([vox.Document([5, 6, 7, 8])])[0]) == 3


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([], "no list of documents"),
        (vox.Document([1, 2]), "a list of"),
        ((vox.Document([1, 2]) for _ in range(2)), "a list of"),
        ([{"prompt": "a"}], "completion"),
        ([{"prompt": "a", "completion": ""}], ""),
        ([vox.Document([1])], "two or more"),
        ([vox.Document([1, 2], [0, 0])], "all zero"),
        ([vox.Document([1, 2], [1])], "weights of shape"),
        ([vox.Document([1, 2], [0, np.inf])], "not finite"),
        ([vox.Document([1, 99999])], "vocabulary"),
        ([vox.Document([1, 2.5])], "tokens that are no ids"),
        ([vox.Document(np.array([1, 2 + 2**32]))], "tokens that are no ids"),
        ([vox.Document([1] * 99999)], "too long"),
        (["text"], "neither rows nor documents"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(trainer, documents, said: str) -> None:
    before = tensors(trainer)
    with pytest.raises(DataError) as caught:
        trainer.forward_backward(documents)
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="no gradients"):
        trainer.optim_step()
    assert tensors(trainer) == before


def test_arguments_that_do_not_fit_are_refused(trainer) -> None:
    cases = [
        ({"weights": [1.0]}, "[1.0] for 6 documents"),
        ({"weights": 1.0}, "1.0 for 6 documents"),
        ({"weights": [1.0] * len(ROWS), "objective": Margin()}, "exclude"),
        ({"options": {"beta": 1}, "objective": Margin()}, "exclude"),
        ({"options": {"beta": 1}}, "no options"),
        ({"rewards": [1.0]}, "exclude"),
        ({"objective": Margin()}, "no chosen answer"),
        ({"objective": "no-such"}, "no-such"),
        ({"weights": [np.ones(2)] * len(ROWS)}, "shape (2,) for document 1"),
        ({"weights": [np.inf] * len(ROWS)}, "not finite"),
        ({"objective": lambda scores: scores[1:]}, "documents"),
        ({"objective": lambda _: None}, "None for 6 documents"),
    ]
    for arguments, said in cases:
        with pytest.raises(VoxError) as caught:
            trainer.forward_backward(ROWS, **arguments)
        assert said in str(caught.value), arguments


def test_an_exception_of_a_function_is_the_callers(trainer) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer.forward_backward(ROWS, lambda _: 1 / 0)


def test_errors_of_an_open_trainer_name_keywords(trainer) -> None:
    with pytest.raises(DataError) as caught:
        trainer.forward_backward([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert caught.value.remedy == "train on the comparison: `objective` dpo"


def test_a_failure_forgets_the_gradients(trainer, bigrams, monkeypatch) -> None:
    (model,) = bigrams
    trainer.forward_backward(ROWS)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "accumulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.forward_backward(ROWS)
    assert not model.gradients["adapter"].any()
    with pytest.raises(ConfigError, match="no gradients"):
        trainer.optim_step()


def test_a_step_that_is_not_finite_is_skipped(trainer, bigrams, monkeypatch) -> None:
    trainer.forward_backward(ROWS)
    trainer.optim_step()
    before = tensors(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(bigrams[0], "accumulate", lambda batch, *_: batch.weights_T * np.nan)
        assert np.isnan(trainer.forward_backward(ROWS).loss)
    trainer.forward_backward(ROWS)
    assert np.isnan(trainer.optim_step())
    assert tensors(trainer) == before
    assert (trainer.step, trainer.state.skipped, trainer.state.updates) == (2, 1, 1)
    trainer.forward_backward(ROWS)
    numbers = []
    update = bigrams[0].update

    def recorded(each, learner):
        numbers.append(each.number)
        return update(each, learner)

    monkeypatch.setattr(bigrams[0], "update", recorded)
    assert trainer.optim_step() > 0
    assert numbers == [2], "AdamW does not count the skipped step"


def test_an_adapter_is_saved_and_loaded(trainer, base: Path, tmp_path: Path) -> None:
    trainer.forward_backward(ROWS)
    trainer.optim_step()
    saved, scores = trainer.save(tmp_path / "saved"), trainer.log_probs(ROWS)
    trainer.forward_backward(ROWS)
    trainer.optim_step()
    trainer.load(saved)
    for before, after in zip(scores, trainer.log_probs(ROWS), strict=True):
        np.testing.assert_array_equal(before, after)
    assert (trainer.step, dict(trainer.state.moments)) == (0, {})
    made_with = json.loads((saved / "vox_adapter.json").read_text())["versions"]
    assert {"numpy", "python"} <= made_with.keys() and "torch" not in made_with  # needs no torch
    with pytest.raises(OutputError, match="exists") as caught:
        trainer.save(saved)
    assert "--out" not in caught.value.remedy
    with pytest.raises(AdapterError, match="no adapter"):
        trainer.load(base)
    other = vox.open_trainer(base, **{**SETTINGS, "rank": 2})
    with other, pytest.raises(ConfigError, match="`rank` 2: the adapter has rank 4"):
        other.load(saved)


def test_a_state_goes_on_bit_for_bit(trainer, base: Path, tmp_path: Path) -> None:
    trainer.forward_backward(ROWS)
    trainer.optim_step()
    folder = trainer.save_state(tmp_path / "states")
    assert folder.name == "step-1"

    def one_more(opened) -> tuple:
        sample = opened.sample("Talk?", max_tokens=5)
        opened.forward_backward([*ROWS[:3]])
        return sample[0].text, opened.optim_step(), tensors(opened)

    expected = one_more(trainer)
    with vox.open_trainer(base, **SETTINGS) as second:
        second.load_state(tmp_path / "states")
        assert (second.step, one_more(second)) == (1, expected)
    other = vox.open_trainer(base, **SETTINGS, seed=1)
    with other, pytest.raises(PlanError, match="other settings"):
        other.load_state(tmp_path / "states")


def interleaved(opened, losses: dict[str, list[float]], alone: bool) -> dict[str, dict]:
    """Three learners on one base; their losses, and their adapters."""
    learners = {"adapter": opened, "b": opened.add("b", seed=1), "c": opened.add("c", seed=2)}
    steps = [(number, name) for number in range(3) for name in learners]
    for number, name in sorted(steps, key=lambda each: each[1]) if alone else steps:
        found = learners[name].forward_backward(ROWS[number : number + 3])
        losses.setdefault(name, []).append(found.loss)
        learners[name].optim_step()
    return {name: tensors(each) for name, each in learners.items()}


def one_by_one(base: Path, losses: dict[str, list[float]], **settings) -> dict[str, dict]:
    """The same learners, each in a trainer of its own."""
    found = {}
    for name, seed in {"adapter": 42, "b": 1, "c": 2}.items():
        with vox.open_trainer(base, **settings, seed=seed) as opened:
            for number in range(3):
                losses.setdefault(name, []).append(
                    opened.forward_backward(ROWS[number : number + 3]).loss
                )
                opened.optim_step()
            found[name] = tensors(opened)
    return found


def test_interleaved_learners_are_what_they_are_alone(base: Path, bigrams) -> None:
    together, apart = {}, {}
    with vox.open_trainer(base, **SETTINGS) as opened:
        found = interleaved(opened, together, alone=False)
        assert len({tensors["lm_head.lora_B.weight"] for tensors in found.values()}) == 3
    assert found == one_by_one(base, apart, **SETTINGS)
    assert together == apart
    assert len(bigrams) == 4


def test_a_learner_is_closed_alone(trainer, bigrams) -> None:
    with trainer.add("b"):
        assert {*bigrams[0].learners} == {"adapter", "b"}
    assert {*bigrams[0].learners} == {"adapter"}
    assert not bigrams[0].closed
    trainer.add("b")


def test_a_closed_trainer_says_so(base: Path) -> None:
    with vox.open_trainer(base, **SETTINGS) as opened:
        pass
    with pytest.raises(ConfigError, match="closed"):
        opened.forward_backward(ROWS)


def test_learners_have_names_of_their_own(trainer, bigrams) -> None:
    second = trainer.add("b")
    for name in ("b", "adapter", "reference"):
        for each in (trainer, second):
            with pytest.raises(ConfigError, match="is taken"):
                each.add(name)
    assert {*bigrams[0].learners} == {"adapter", "b"}


def test_a_backend_with_one_learner_says_so(trainer) -> None:
    trainer._shared.inputs.backend.manifest.capabilities.learners = False
    with pytest.raises(BackendError, match="one learner"):
        trainer.add("b")


def test_settings_of_a_run_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="epochs"):
        vox.open_trainer(base, epochs=3)
    with pytest.raises(ConfigError, match="did you mean"):
        vox.open_trainer(base, learning_rate=3)


def test_the_backend_is_told(base: Path, bigrams) -> None:
    events = []
    vox.open_trainer(base, **SETTINGS, on_event=events.append).close()
    assert Notice("backend bigram, for a test") in events


GUIDE = Path(__file__).parents[2] / "docs/guide/own-loop.md"


def guide_blocks() -> list[str]:
    """The code of the guide's indented blocks."""
    paragraphs = GUIDE.read_text().split("\n\n")
    joined, blocks = False, list[str]()
    for paragraph in paragraphs:
        indented = all(line.startswith("    ") for line in paragraph.splitlines())
        if indented and joined:
            blocks[-1] += "\n\n" + paragraph
        elif indented:
            blocks.append(paragraph)
        joined = indented
    return [textwrap.dedent(block) for block in blocks]


@pytest.fixture
def in_guide(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bigrams):
    """Run a block of the guide on a tiny model."""
    monkeypatch.chdir(tmp_path)
    opened = vox.open_trainer

    def open_tiny(model=None, **settings):
        return opened(base, **{**SETTINGS, **settings})

    monkeypatch.setattr(vox, "open_trainer", open_tiny, raising=False)

    def run(block: str, **names: object) -> dict[str, object]:
        space = {"vox": vox, **names}
        exec(block, space)
        return space

    return run


def test_the_guides_reinforce_learns_digits(in_guide, tmp_path, capsys) -> None:
    reinforce = guide_blocks()[0].replace("lr=1e-3", "lr=1e-1")  # a random model has far to go
    in_guide(reinforce)
    rewards = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(rewards) == 30
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
    assert (tmp_path / "digits" / "adapter_model.safetensors").is_file()


def test_the_guides_other_blocks_work(in_guide, trainer, base: Path) -> None:
    _, clipped, several = guide_blocks()
    in_guide(several, MODEL=base, rows=ROWS)
    samples = trainer.sample("Talk?", n=3, max_tokens=4)
    space = in_guide(clipped)
    found = trainer.forward_backward(
        samples, lambda scores: space["clipped"](scores, samples, [1.0, -1.0, 0.5])
    )
    # The policy is the one that was sampled from, so every ratio is 1.
    sums = [float(scores_K.sum()) for scores_K in found.log_probs]
    assert found.loss == pytest.approx(-np.dot([1.0, -1.0, 0.5], sums), rel=1e-5)
