"""Generation in a running batch: the same text alone and in company, and transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vox_core.contract import AdapterState, LoadJob
from vox_testing import jobs
from vox_testing.tiny import FAMILIES
from vox_torch import cached, lora_rows, running
from vox_torch.attention import sdpa, within
from vox_torch.base import load_base
from vox_torch.load import TorchModel, load
from vox_torch.lora_rows import RowAdapters
from vox_torch.profile import DeviceProfile

LENGTHS = (3, 58, 17, 1, 90)
"""Of prompts: shorter and longer than a window of 16 and a chunk of 32 tokens; one outgrows slots
of 64."""

NEW = 12
STEPWISE = {"qwen3_5"}

# Largest difference of log-probabilities between a cached row and the whole text, in float32: the
# seam's bound. Observed: 4e-6, and 1.0e-4 with a recurrent state, which transformers computes by
# other formulas for a token than for a text.
CLOSE = 1e-4
CLOSE_RECURRENT = 5e-4


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts get a product for each adapter, and new tokens share one."""
    monkeypatch.setattr(running, "CHUNK_ON_CPU", 32)
    monkeypatch.setattr(cached, "_GROWTH", 64)
    monkeypatch.setattr(cached, "_FEW", 2)
    monkeypatch.setattr(lora_rows, "_SHARED", 64)


def opened(folder: Path) -> TorchModel:
    return load(LoadJob(folder, "fp32"), DeviceProfile("cpu"))


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, 256, length).tolist() for length in LENGTHS]


def greedy(
    model: TorchModel, rows: dict[int, tuple[list[int], str | None]], at_once: int = 99
) -> dict[int, tuple[list[int], list[np.ndarray]]]:
    """Row -> its text and the logits of each token; at most `at_once` rows are in the batch."""
    found: dict[int, tuple[list[int], list[np.ndarray]]] = {row: ([], []) for row in rows}
    waiting, tokens, working = list(rows), {}, 0
    while waiting or working:
        while waiting and working < at_once:
            model.insert(waiting[0], np.array(rows[waiting[0]][0]), rows[waiting.pop(0)][1])
            working += 1
        advanced, tokens = model.advance(tokens), {}
        for row, logits_V in advanced.items():
            found[row][0].append(int(logits_V.argmax()))
            found[row][1].append(logits_V)
            if len(found[row][0]) == NEW:
                model.remove(row)
                working -= 1
            else:
                tokens[row] = found[row][0][-1]
    return found


def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    return torch.tensor(logits_TV).double().log_softmax(-1).numpy()


def distance(model: TorchModel, prompt: list[int], adapter: str | None, text: tuple) -> float:
    """From the log-probabilities of the whole text at once."""
    whole_TV = model.logits(np.array(prompt + text[0]), adapter)[len(prompt) - 1 : -1]
    return float(np.abs(log_softmax(whole_TV) - log_softmax(np.stack(text[1]))).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_text_alone_in_company_and_in_transformers(
    tiny: Callable[..., Path], family: str
) -> None:
    folder = tiny(family)
    model, base = opened(folder), load_base(folder, "fp32", "cpu")
    rows = {row: (prompt, None) for row, prompt in enumerate(prompts())}
    together = greedy(model, rows)
    alone = greedy(model, rows, at_once=1)
    # Two at once, the longest first: the others enter and leave while it works.
    backwards = greedy(model, dict(reversed(rows.items())), at_once=2)
    for row, (prompt, _) in rows.items():
        assert together[row][0] == alone[row][0] == backwards[row][0]
        ids = torch.tensor([prompt])
        expected = base.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert together[row][0] == expected[0, len(prompt) :].tolist()
        bound = CLOSE_RECURRENT if family in STEPWISE else CLOSE
        assert distance(model, prompt, None, together[row]) < bound
    assert (model._batch.one_by_one is None) == (family not in STEPWISE)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_through_an_accelerators_kernel_are_those_of_a_cpu(
    tiny: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel's definition in its place: rows with chunks of a prompt or one token, beside
    others in slots."""
    seen: set[int] = set()

    def kernel(query_THD, key_THD, value_THD, bounds, longest, scale, window):
        texts = [each.diff().tolist() for each in bounds]
        assert [(each.dtype, int(each[0])) for each in bounds] == [(torch.int32, 0)] * 2
        assert longest == tuple(map(max, texts))
        seen.update(texts[0])
        parts = (
            each.transpose(0, 1)[None].split(lengths, dim=2)
            for each, lengths in zip(
                (query_THD, key_THD, value_THD), texts + texts[1:], strict=True
            )
        )
        return torch.cat(
            [
                sdpa(*qkv, scale, within(*(e.shape[2] for e in qkv[:2]), window, query_THD))[0]
                for qkv in zip(*parts, strict=True)
            ],
            dim=1,
        ).transpose(0, 1)

    rows = {row: (prompt, None) for row, prompt in enumerate(prompts())}
    expected = greedy(opened(tiny(family)), rows)
    monkeypatch.setattr(cached, "has_varlen", lambda *_: True)
    monkeypatch.setattr(cached, "varlen", kernel)
    model = opened(tiny(family))
    found = greedy(model, rows)
    assert model._batch.one_by_one is None and {1, 8} <= seen
    for row, (text, logits) in found.items():
        assert text == expected[row][0]
        assert np.allclose(logits, expected[row][1], atol=CLOSE)


def test_slots_have_room_for_the_rows_that_enter_and_no_more() -> None:
    module, rows, slots = torch.nn.Identity(), [], cached.SlotsByCapacity()
    for _ in range(5):
        rows.append(cached.RowCache())
        rows[-1].append(module, *torch.zeros(2, 1, 9, 4))
        rows[-1].length = 9
    slots.hold(rows)
    assert [len(buffer) for buffer in rows[0].slots.buffers[module]] == [5, 5]


@pytest.mark.parametrize("cap", [None, 50.0])
def test_rows_whose_scores_are_capped_take_no_slots(tiny: Callable[..., Path], cap: float) -> None:
    model = opened(tiny("llama"))
    model._adapters.base.config.attn_logit_softcapping = cap
    greedy(model, {row: (prompt, None) for row, prompt in enumerate(prompts())})
    forward = model._batch._forward
    assert isinstance(forward, running.Together)
    assert bool(forward._slots._slots) == (cap is None)


def test_a_long_prompt_does_not_hold_up_the_others(tiny: Callable[..., Path]) -> None:
    model = opened(tiny("llama"))
    model.insert(0, np.arange(5))
    model.advance({})
    model.insert(1, np.arange(100))  # 4 chunks of 32
    returned = [sorted(model.advance({0: 7})) for _ in range(4)]
    assert returned == [[0], [0], [0], [0, 1]]


def test_a_short_prompt_is_computed_before_a_long_one(tiny: Callable[..., Path]) -> None:
    """In one step, and the oldest prompt gets on by a quarter of a chunk of 32 in each; alone it
    gets two chunks."""
    model = opened(tiny("llama"))
    model.insert(0, np.arange(100))
    assert model.advance({}) == {}
    model.insert(1, np.arange(400))
    model.insert(2, np.arange(16))
    returned = [sorted(model.advance({})) for _ in range(5)]
    assert returned == [[2], [], [], [], [0]]  # 36 tokens left, 8 in each step


def test_rows_lie_side_by_side_while_they_are_advanced(tiny: Callable[..., Path]) -> None:
    model = opened(tiny("llama"))
    tokens = np.random.default_rng(3).integers(0, 256, (4, 9))
    for row in range(3):
        model.insert(row, tokens[row])
    model.advance({})

    def side_by_side() -> list[bool]:
        return [model._batch._rows[row].cache.slots is not None for row in range(3)]

    assert side_by_side() == [False] * 3
    model.advance(dict.fromkeys(range(3), 1))
    assert side_by_side() == [True] * 3
    found = model.advance({0: 2, 1: 2})
    assert side_by_side() == [True, True, False]
    model.insert(3, np.append(tokens[2], [1, 5]))
    model.reuse(3, 2, 10)
    model.remove(1)
    found = {1: found[1], **model.advance({0: 3, 2: 7})}
    for row, text in {0: [1, 2, 3], 1: [1, 2], 2: [1, 7], 3: [1, 5]}.items():
        prompt = tokens[2 if row == 3 else row]
        assert np.allclose(found[row], model.logits(np.append(prompt, text))[-1], atol=CLOSE)


def test_whole_prompts_do_not_hold_up_the_oldest(tiny: Callable[..., Path]) -> None:
    """Where a prompt cannot be computed in chunks."""
    base = load_base(tiny("llama"), "fp32", "cpu")
    batch = running.RunningBatch(base, RowAdapters(base), "cpu", "sdpa", "a reason")
    batch.insert(0, np.arange(50))
    batch.insert(1, np.arange(40))
    assert sorted(batch.advance({})) == [0, 1]


def test_rows_that_are_not_advanced_wait(tiny: Callable[..., Path]) -> None:
    model = opened(tiny("llama"))
    for row in range(3):
        model.insert(row, np.arange(4 + row))
    assert sorted(model.advance({})) == [0, 1, 2]
    assert sorted(model.advance({1: 9})) == [1]
    model.remove(1)
    found_V = model.advance({2: 9})[2]
    expected_V = model.logits(np.array([0, 1, 2, 3, 4, 5, 9]))[-1]
    assert np.allclose(found_V, expected_V, atol=CLOSE)


def test_a_row_number_can_be_used_again(tiny: Callable[..., Path]) -> None:
    model = opened(tiny("llama"))
    for prompt in ([3, 4, 5], [9, 8, 7, 6]):
        model.insert(0, np.array(prompt))
        found_V = model.advance({})[0]
        assert np.allclose(found_V, model.logits(np.array(prompt))[-1], atol=CLOSE)
        model.remove(0)


def adapter(folder: Path, kind: str = "lora", rank: int = 4) -> AdapterState:
    """One that moves the logits by much more than `CLOSE`; of kind "saved", with a whole head."""
    method = "lora" if kind == "saved" else kind
    made = jobs.start(folder, jobs.plan(folder, method=method, rank=rank))
    state = jobs.stirred(made, 0.1 * rank).adapter
    if kind != "saved":
        return state
    head_VH = np.random.default_rng(1).normal(0, 0.2, (260, 32)).astype(np.float32)
    return replace(state, saved={"lm_head.weight": head_VH})


def by_row(names: Sequence[str | None]) -> dict[int, tuple[list[int], str | None]]:
    """Rows in no order of their adapters."""
    return {row: (prompt, names[row % len(names)]) for row, prompt in enumerate(prompts())}


KINDS = ("lora", "rslora", "dora", "saved")


@pytest.fixture(
    params=[*((kind, "llama") for kind in KINDS), ("lora", "gpt2"), ("lora", "qwen3_5")]
)
def adapted(
    request: pytest.FixtureRequest, tiny: Callable[..., Path]
) -> Iterator[tuple[TorchModel, Path]]:
    """A model with the adapters "a", of a kind, and "b.c", of another rank."""
    kind, family = request.param
    folder = tiny(family)
    model = opened(folder)
    model.add_adapter("a", adapter(folder, kind))
    model.add_adapter("b.c", adapter(folder, rank=2))
    yield model, folder
    model.close()


def test_each_row_has_its_own_adapter(adapted: tuple[TorchModel, Path]) -> None:
    model, _ = adapted
    rows = by_row(["b.c", None, "a"])
    together, alone = greedy(model, rows), greedy(model, rows, at_once=1)
    for row, (prompt, name) in rows.items():
        assert together[row][0] == alone[row][0]
        bound = CLOSE if model._batch.one_by_one is None else CLOSE_RECURRENT
        assert distance(model, prompt, name, together[row]) < bound
        other = {"a": None, None: "b.c", "b.c": "a"}[name]
        assert distance(model, prompt, other, together[row]) > 100 * CLOSE


def test_an_adapter_that_enters_or_leaves_changes_no_other_row(
    tiny: Callable[..., Path],
) -> None:
    folder = tiny("llama")
    model = opened(folder)
    model.add_adapter("a", adapter(folder))
    rows = {0: ([1, 2, 3], "a"), 1: ([4, 5], None)}
    expected = greedy(model, rows)
    for row, (prompt, name) in rows.items():
        model.insert(row, np.array(prompt), name)
    found = model.advance({})
    model.add_adapter("b", adapter(folder, rank=2))
    found = model.advance({row: int(logits_V.argmax()) for row, logits_V in found.items()})
    model.remove_adapter("b")
    model.logits(np.arange(9), "a")  # another computation between two steps
    found = model.advance({row: int(logits_V.argmax()) for row, logits_V in found.items()})
    for row in rows:
        assert np.allclose(found[row], expected[row][1][2], atol=CLOSE)


@pytest.mark.parametrize("bad", ["lora_A", "lora_B"])
def test_an_adapter_with_infinite_values_changes_no_other_row(
    tiny: Callable[..., Path], bad: str
) -> None:
    folder = tiny("llama")
    model = opened(folder)
    model.add_adapter("a", adapter(folder))
    model.add_adapter("b", adapter(folder, rank=2))
    rows = {0: ([1, 2, 3], "a"), 1: ([4, 5], "b"), 2: ([6], None)}
    expected = greedy(model, rows)
    state = adapter(folder, rank=2)
    tensors = {
        name: np.full_like(value, np.inf) if bad in name else value
        for name, value in state.tensors().items()
    }
    model.remove_adapter("b")
    model.add_adapter("b", state.with_tensors(tensors))
    found = greedy(model, rows)
    assert found[0][0] == expected[0][0] and found[2][0] == expected[2][0]
    assert not np.isfinite(found[1][1][-1]).all()
    model.insert(0, np.array([1, 2, 3]), "a")
    model.insert(1, np.array([4, 5]), "b")
    model.advance({})
    model.advance({0: 1, 1: 1})
    model.remove(1)
    model.insert(2, np.array([6]))  # shorter than row 0, and in the slot of row 1
    found_V = model.advance({0: 1})[2]
    assert np.isfinite(model.advance({0: 1, 2: int(found_V.argmax())})[2]).all()


def test_a_model_that_fails_the_trial_is_computed_row_by_row(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = running.Together.__call__

    def wrong(self: running.Together, news: Sequence[running.New]) -> torch.Tensor:
        return forward(self, news).roll(1, 0)

    monkeypatch.setattr(running.Together, "__call__", wrong)
    model = opened(tiny("llama"))
    rows = {row: (prompt, None) for row, prompt in enumerate(prompts())}
    found = greedy(model, rows)
    assert "from those without a cache" in model._batch.one_by_one
    assert all(distance(model, rows[row][0], None, text) < CLOSE for row, text in found.items())
