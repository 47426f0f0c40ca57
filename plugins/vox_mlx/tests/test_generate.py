"""The running batch: each row's logits are those of its own document, whoever else is in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from vox_core.contract import AdapterState, LoadJob, Model, World
from vox_mlx import backend, generate
from vox_testing import jobs
from vox_testing.tiny import make_model

LENGTHS = (1, 5, 30, 17, 2, 40, 9, 21)


def adapters(folder: Path) -> dict[str, AdapterState]:
    """LoRA, and DoRA of another rank."""
    return {
        method: jobs.stirred(
            jobs.start(folder, jobs.plan(folder, method=method, rank=rank)), 0.1
        ).adapter
        for method, rank in (("lora", 4), ("dora", 3))
    }


def loaded(folder: Path, **job: object) -> Model:
    model = backend.vox_load(LoadJob(folder, "fp32", **job), Mock())
    for name, state in adapters(folder).items():
        model.add_adapter(name, state)
    return model


def prompts() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, length) for length in LENGTHS]


def far(found_V: np.ndarray, exact_V: np.ndarray) -> float:
    return float(np.abs(found_V - exact_V).max() / np.abs(exact_V).max())


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "qwen3_5"])
def test_rows_that_come_and_go_have_the_logits_of_their_documents(tmp_path, family, monkeypatch):
    """Windows of 16 (mistral, gemma3) and recurrent state (qwen3_5); prompts in chunks of 7; at
    each step a fifth of the rows stay behind, and some leave for good."""
    monkeypatch.setattr(generate, "CHUNK_ON_CPU", 7)
    model = loaded(make_model(family, tmp_path / family))
    names = [None, "lora", "dora"]
    random = np.random.default_rng(2)
    rows = {number: list(prompt) for number, prompt in enumerate(prompts())}
    waiting, ready, checked = [*rows], {}, 0
    for step in range(50):
        if waiting and step % 3 == 0:
            model.insert(waiting[0], np.array(rows[waiting[0]]), names[waiting.pop(0) % 3])
        chosen = {row: token for row, token in ready.items() if random.random() < 0.8}
        for row, token in chosen.items():
            rows[row].append(token)
            del ready[row]
        for row, logits_V in model.advance(chosen).items():
            exact_V = model.logits(np.array(rows[row]), names[row % 3])[-1]
            # float32, sums in another order; recurrent states add theirs up over all positions.
            assert far(logits_V, exact_V) < (1e-4 if family == "qwen3_5" else 1e-5)
            ready[row] = int(random.integers(0, 256))
            checked += 1
        for row in [row for row in ready if random.random() < 0.02]:
            model.remove(row)
            del ready[row]
    assert checked > 100


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("generate") / "llama")


def greedy(model: Model, order: Sequence[int], at_once: int, count: int) -> dict[int, list[int]]:
    """Answers to `prompts`, each by another adapter, with so many rows in the batch."""
    names, asked = [None, "lora", "dora"], prompts()
    answers: dict[int, list[int]] = {row: [] for row in order}
    todo: Iterator[int] = iter(order)
    live: set[int] = set()
    tokens: dict[int, int] = {}
    while True:
        while len(live) < at_once and (row := next(todo, None)) is not None:
            model.insert(row, asked[row], names[row % 3])
            live.add(row)
        if not live:
            return answers
        for row, logits_V in model.advance(tokens).items():
            answers[row].append(int(logits_V.argmax()))
            tokens[row] = answers[row][-1]
            if len(answers[row]) == count:
                model.remove(row)
                live.remove(row)
                del tokens[row]


def test_greedy_answers_do_not_depend_on_the_other_rows(llama):
    model = loaded(llama)
    alone = greedy(model, range(8), 1, 12)
    assert greedy(model, range(8), 8, 12) == alone
    assert greedy(model, [5, 2, 7, 0, 3, 6, 1, 4], 3, 12) == alone
    assert len({tuple(answer) for answer in alone.values()}) == 8


def test_rows_of_an_adapter_that_replaces_tensors_are_apart(llama):
    model = loaded(llama)
    state = saving_of(llama)
    model.add_adapter("saving", state)
    names = ["saving", None, "saving", "lora"]
    for row, name in enumerate(names):
        model.insert(row, prompts()[row + 2], name)
    found = model.advance({})
    found = model.advance(dict.fromkeys(found, 3))
    for row, name in enumerate(names):
        exact_V = model.logits(np.append(prompts()[row + 2], 3), name)[-1]
        assert far(found[row], exact_V) < 1e-5


def saving_of(folder: Path) -> AdapterState:
    state = jobs.stirred(jobs.start(folder, jobs.plan(folder))).adapter
    whole = {"model.layers.0.input_layernorm.weight": np.full(32, 1.7, np.float32)}
    return AdapterState(state.method, state.modules, whole)


def test_a_long_prompt_does_not_hold_up_the_others(llama, monkeypatch):
    monkeypatch.setattr(generate, "CHUNK_ON_CPU", 8)
    model = loaded(llama)
    model.insert(0, np.arange(3))
    assert model.advance({}).keys() == {0}
    model.insert(1, np.arange(30))
    seen = [{*model.advance({0: 5})} for _ in range(5)]
    assert seen == [{0}, {0}, {0}, {0, 1}, {0}]


def test_a_number_may_be_used_again(llama):
    model = loaded(llama)
    for row in (0, 1):
        model.insert(row, prompts()[row + 2])
    model.advance({})
    model.advance({0: 1, 1: 2})
    model.remove(0)
    model.insert(0, prompts()[5], "lora")
    model.advance({})
    found = model.advance({0: 3, 1: 4})
    exact = (
        model.logits(np.append(prompts()[5], 3), "lora")[-1],
        model.logits(np.append(prompts()[3], [2, 4]))[-1],
    )
    assert max(far(found[row], exact[row]) for row in (0, 1)) < 1e-5


def test_a_learner_answers_as_it_is_now(llama):
    from vox_core.contract import TrainJob, Update

    trainer = backend.vox_train(TrainJob(jobs.plan(llama), llama), Mock(world=World()))
    trainer.add_learner("one", jobs.stirred(jobs.start(llama, jobs.plan(llama))))
    batch = jobs.batch(jobs.documents(2))
    seen = []
    for number in (1, 2):
        trainer.insert(0, prompts()[3], "one")
        trainer.advance({})
        found_V = trainer.advance({0: 9})[0]
        trainer.remove(0)
        assert far(found_V, trainer.logits(np.append(prompts()[3], 9), "one")[-1]) < 1e-5
        seen.append(found_V)
        trainer.accumulate(batch, 0, "one")
        trainer.log_probs(batch, "one")
        trainer.update(Update(number, 1e-1, 1.0), "one")
    assert far(*seen) > 1e-2


def test_a_streamed_model_answers_in_batches(llama):
    plain, streamed = loaded(llama), loaded(llama, streamed=True)
    assert greedy(streamed, [1, 2, 4], 3, 4) == greedy(plain, [1, 2, 4], 3, 4)
