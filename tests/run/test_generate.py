"""Rows in a running batch: each has the tokens that it has alone, and leaves when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from tests.run.numbers_model import VOCABULARY, InParts, Numbers
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import TrainingError
from vox_core.run import generate
from vox_core.run.generate import Generator, Prompt, Token, cache_bytes
from vox_core.run.load import AnswerText, apart
from vox_core.run.plan import positions
from vox_core.run.sampling import Sampling, log_prob, next_token

PROMPTS = [[1, 2, 3], [4], [9, 9, 9, 9, 9, 9], [7, 1], [30], [2, 2], [63, 0, 5]]


def prompts(temperature: float = 0.9) -> list[Prompt]:
    """Rows of different lengths, settings and adapters."""
    return [
        Prompt(
            tokens,
            Sampling(max_tokens=3 + 2 * row, temperature=temperature, top_k=20, seed=5, row=row),
            adapter="a" if row % 3 == 0 else None,
        )
        for row, tokens in enumerate(PROMPTS)
    ]


def texts(found) -> dict[int, list[int]]:
    """Row -> its tokens."""
    said: dict[int, list[int]] = {}
    for token in found:
        said.setdefault(token.row, []).append(token.id)
    return said


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Each row by the definition: a token from the logits of all tokens before it."""
    said = {}
    for row, prompt in enumerate(prompts()):
        tokens = [*prompt.tokens]
        for _ in range(prompt.sampling.max_tokens):
            logits_TV = Numbers().logits(np.array(tokens), prompt.adapter)
            tokens.append(next_token(logits_TV[-1], prompt.sampling, tokens))
        said[row] = tokens[len(prompt.tokens) :]
    return said


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, 64),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            64,
        ),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "b": {"rope_type": "su"}}}, 512),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 64}}, 512),
        ({"rope_parameters": {"rope_type": "dynamic"}}, 512),
        ({}, 512),
    ],
)
def test_a_row_may_not_change_the_rotary_frequencies_of_others(config, expected) -> None:
    """As LongRoPE does beyond its original length."""
    assert positions({"max_position_embeddings": 512, **config}) == expected


@pytest.mark.parametrize("model", [Numbers, InParts])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_row_has_the_tokens_that_it_has_alone(alone, model, rows) -> None:
    made = model()
    assert texts(Generator(made, rows).generate(prompts())) == alone
    assert max(map(len, made.batches)) == min(rows, len(PROMPTS))
    assert made.inside == []
    assert [len(alone[row]) for row in alone] == [3, 5, 7, 9, 11, 13, 15]


def test_seed_and_row_decide_the_random_numbers() -> None:
    def said(**changed: int) -> list[int]:
        sampling = Sampling(max_tokens=12, temperature=1, **changed)
        return texts(Generator(Numbers()).generate([Prompt([1], sampling)]))[0]

    assert said() == said()
    assert len({tuple(said(seed=seed, row=row)) for seed in (0, 1) for row in (0, 1)}) == 4


def test_a_row_enters_as_soon_as_another_ends() -> None:
    model = Numbers()
    short, long = Sampling(max_tokens=1), Sampling(max_tokens=6)
    rows = [Prompt([1], each) for each in (long, short, short, short)]
    assert [t.row for t in Generator(model, 2).generate(rows)] == [0, 1, 0, 2, 0, 3, 0, 0, 0]
    assert len(model.batches) == 6, "as many steps as the longest row has tokens"


def test_prompts_are_read_when_there_is_room() -> None:
    read = []

    def endless():
        for number in range(1000):
            read.append(number)
            yield Prompt([1], Sampling(max_tokens=2))

    list(islice(Generator(Numbers(), 3).generate(endless()), 9))
    assert len(read) <= 3 * 2 + 3 + 1


def test_rows_share_the_cache() -> None:
    """Three rows of at most 2 + 8 tokens; a single row enters though it is too long."""
    for tokens, most in ((30, 3), (29, 2), (19, 1), (5, 1)):
        model = Numbers()
        rows = [Prompt([1, 2], Sampling(max_tokens=8))] * 4
        assert len(texts(Generator(model, 8, tokens).generate(rows))) == 4
        assert max(map(len, model.batches)) == most


class Caching(Numbers):
    """Notes which rows took how much from another, and checks that they begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.reused: list[int] = []

    def reuse(self, row, source, count) -> None:
        assert source in self.inside
        (new, adapter), (old, other) = self._rows[row], self._rows[source]
        assert (new[:count], adapter) == (old[:count], other)
        assert 0 < count < len(new)
        self.reused.append(count)
        return True


def test_rows_take_their_beginning_from_rows_that_ended() -> None:
    common = list(range(40))
    rows = [
        Prompt([*common, *range(n)], Sampling(max_tokens=4), adapter="a" if n % 2 else None)
        for n in range(12)
    ]
    expected = texts(Generator(Numbers()).generate(rows))
    model = Caching()
    generator = Generator(model, 3, cache_tokens=200)
    assert texts(generator.generate(rows)) == expected
    assert model.inside == [], "ended rows stay if asked to"
    model.reused.clear()
    generator.keep = 90
    assert texts(generator.generate(rows)) == expected
    assert len(model.reused) >= 4
    assert min(model.reused) >= 40 - 1
    assert 0 < len(model.inside) <= 2, "ended rows of up to 90 tokens stay"
    generator.forget("a")
    assert all(model._rows[row][1] is None for row in model.inside)
    generator.close()
    assert model.inside == []


def test_answers_to_one_prompt_compute_it_once() -> None:
    """The others enter when the first one has computed it; a short prompt does not wait for it."""
    prompt, short = list(range(40)), list(range(18))
    asked = [Prompt(prompt, Sampling(max_tokens=4, temperature=1, row=n)) for n in range(6)]
    asked.insert(1, Prompt(short, Sampling(max_tokens=9)))
    model = Caching()
    found = list(Generator(model, 8).generate(asked))
    assert texts(found) == texts(Generator(Numbers(), 1).generate(asked))
    assert model.reused == [39] * 5
    assert model.batches[0] == [0, 1]


@pytest.mark.parametrize("model", [Caching, Numbers])
def test_a_beginning_is_waited_for_once(model) -> None:
    """By many prompts that share it; where no row can take it from another, by the first alone."""
    rows = [Prompt([*range(40), n], Sampling(max_tokens=2)) for n in range(24)]
    made = model()
    assert len(texts(Generator(made, 8).generate(rows))) == 24
    assert list(map(len, made.batches[:2])) == [1, 8]
    assert len(made.batches) < 12


def test_without_memory_for_a_cache_there_is_one_row() -> None:
    model = Numbers()
    list(Generator(model, 8, 0).generate([Prompt([1, 2], Sampling(max_tokens=2))] * 3))
    assert max(map(len, model.batches)) == 1


def test_kept_rows_make_room_for_others() -> None:
    model = Caching()
    generator = Generator(model, 3, cache_tokens=100)
    generator.keep = 100
    for tokens in (60, 30, 70):
        list(generator.generate([Prompt([tokens] * tokens, Sampling(max_tokens=2))]))
    assert len(model.inside) == 1, "72 tokens and 61 are more than 100"


def test_short_kept_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MOST_KEPT", 2)
    model = Caching()
    generator = Generator(model, 3)
    generator.keep = 1000
    for token in range(5):
        list(generator.generate([Prompt([token] * 20, Sampling(max_tokens=2))]))
    assert len(model.inside) == 2


def test_a_row_that_cannot_copy_a_cache_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Caching()
    generator = Generator(model, 3)
    generator.keep = 100
    row = Prompt([3] * 30, Sampling(max_tokens=2))
    list(generator.generate([row]))

    def fails(row: int, source: int, count: int) -> None:
        raise MemoryError

    monkeypatch.setattr(model, "reuse", fails)
    with pytest.raises(MemoryError):
        list(generator.generate([row]))
    assert len(model.inside) == 1, "the kept one"


def test_the_caller_ends_a_row_and_sees_its_last_token(alone) -> None:
    whole = alone[6]
    seen: list[int] = []

    def ended(token: int) -> bool:
        seen.append(token)
        return len(seen) == 4

    row = prompts()[6]
    stopped = Prompt(row.tokens, row.sampling, ended, row.adapter)
    found = list(Generator(Numbers()).generate([stopped]))
    assert [token.id for token in found] == seen == whole[:4]
    assert [token.finish for token in found] == [None, None, None, "stop"]
    assert [token.finish for token in Generator(Numbers()).generate([row])][-2:] == [None, "length"]


def test_log_probs_are_of_the_logits_without_sampling() -> None:
    model = Numbers()
    found = list(Generator(model).generate(prompts(temperature=2.0), log_probs=True))
    for row, prompt in enumerate(prompts()):
        tokens = [token for token in found if token.row == row]
        whole = [*prompt.tokens, *(token.id for token in tokens)]
        logits_TV = model.logits(np.array(whole), prompt.adapter).astype(np.float64)
        for position, token in enumerate(tokens, start=len(prompt.tokens)):
            exact_V = np.exp(logits_TV[position - 1]) / np.exp(logits_TV[position - 1]).sum()
            # The sum's terms are float32: off by 2^-23 of themselves where they count.
            assert token.log_prob == pytest.approx(np.log(exact_V[whole[position]]), abs=2**-22)
    assert all(token.log_prob is None for token in Generator(model).generate(prompts()))


def test_log_prob_of_large_logits_is_finite() -> None:
    logits_V = np.array([1e4, 1e4, -1e4], np.float32)
    assert log_prob(logits_V, 0) == pytest.approx(-np.log(2))
    assert log_prob(logits_V, 2) == pytest.approx(-2e4 - np.log(2))


@pytest.mark.parametrize("model", [Numbers, InParts])
def test_iterators_are_read_in_turns(alone, model) -> None:
    """One may compute the prompts of the other along; no logits are lost."""
    made = model()
    generator = Generator(made, 2)
    one, other = generator.generate(prompts()[:3]), generator.generate(prompts()[3:])
    said: list[list] = [[], []]
    going = {0: one, 1: other}
    while going:
        for number, iterator in list(going.items()):
            if (token := next(iterator, None)) is None:
                del going[number]
            else:
                said[number].append(token)
    assert texts(said[0]) == {row: alone[row] for row in range(3)}
    assert texts(said[1]) == {row: alone[row + 3] for row in range(4)}


def test_rows_leave_with_their_iterator_or_with_the_generator() -> None:
    model = Numbers()
    generator = Generator(model)
    first, second = generator.generate(prompts()), generator.generate(prompts())
    next(first), next(second)
    assert len(model.inside) == 2 * len(PROMPTS)
    first.close()
    assert len(model.inside) == len(PROMPTS)
    generator.close()
    assert model.inside == []
    model.close()
    second.close()  # nothing is removed from a closed model


def test_rows_leave_when_a_step_fails() -> None:
    model = Numbers()

    def fail(token: int) -> bool:
        raise LookupError

    broken = Prompt([1], Sampling(max_tokens=4), fail)
    with pytest.raises(LookupError):
        list(Generator(model).generate([*prompts(), broken]))
    assert model.inside == []


class Broken(Caching):
    """The adapter `bad` computes no numbers."""

    def logits(self, tokens_T, adapter=None, first=0):
        return super().logits(tokens_T, adapter, first) * (np.nan if adapter == "bad" else 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_the_rows(temperature) -> None:
    model = Broken()
    bad = Prompt((1, 2, 3), Sampling(temperature=temperature), adapter="bad")
    with pytest.raises(TrainingError, match="not numbers"):
        list(Generator(model).generate([*prompts(), bad]))
    assert not model.inside


def test_a_row_without_numbers_ends_alone_where_the_caller_steps(alone) -> None:
    """And no other row begins with its cache."""
    model = Broken()
    generator = Generator(model)
    generator.keep = 90
    bad = Prompt(range(40), Sampling(), adapter="bad")
    rows, found = generator.rows(), list[Token]()
    for index, prompt in enumerate([*prompts(), bad]):
        rows.enter(index, prompt)
    while rows:
        found += rows.step()
    (failed,) = [token for token in found if token.error]
    assert failed.row == len(PROMPTS)
    assert texts(token for token in found if token is not failed) == alone
    rows.enter(0, bad)
    assert model.reused == []


def test_no_prompts_no_tokens() -> None:
    model = Numbers()
    assert list(Generator(model).generate([])) == model.batches == []


LLAMA = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 2 * 30 * 3 * 64 * 2),
        ({"text_config": {**LLAMA, "head_dim": 128}}, 2 * 30 * 3 * 128 * 2),
        (
            {**LLAMA, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 6},
            2 * 6 * 3 * 64 * 2,
        ),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 2 * 12 * 768 * 2),
        ({}, None),
    ],
)
def test_cache_bytes_of_a_token(config, expected) -> None:
    assert cache_bytes(config, "bf16") == expected
    assert cache_bytes(config, "fp32") == (expected and 2 * expected)


def test_the_fake_is_no_constant() -> None:
    logits_TV = Numbers().logits(np.array([1, 2, 3]))
    assert logits_TV.shape == (3, VOCABULARY)
    assert len({int(row.argmax()) for row in logits_TV}) > 1


def test_a_row_enters_while_the_prompt_of_another_is_computed() -> None:
    made = InParts()
    rows = Generator(made, 2).rows()
    long, short, *_ = prompts()
    rows.enter(0, long)
    assert rows.step() == []  # one part of its prompt
    rows.enter(1, short)
    rows.step()
    assert made.batches == [[0], [0, 1]]


def test_what_is_entered_apart_leaves_no_thread_behind() -> None:
    seen: list[threading.Thread] = []

    @contextmanager
    def opening() -> Iterator[str]:
        seen.append(threading.current_thread())
        yield "loaded"
        seen.append(threading.current_thread())

    with apart(opening()) as found:
        assert found == "loaded"
        assert seen[0] is not threading.current_thread()
        assert not seen[0].is_alive()
    assert seen[1] is threading.current_thread()
    with pytest.raises(OSError, match="refused"), apart(refused()):
        pass


@contextmanager
def refused() -> Iterator[None]:
    raise OSError("refused")
    yield


@pytest.mark.parametrize("model", [Numbers, InParts])
def test_a_caller_steps_rows_that_enter_and_leave_between_steps(alone, model) -> None:
    made = model()
    rows, said = Generator(made, 3).rows(), {}
    waiting = dict(enumerate(prompts()))
    gone = {1: 2, 5: 4}  # row -> tokens after which its caller leaves
    while waiting or len(rows):
        for row in [*waiting][:1]:
            if rows.has_room(waiting[row]):
                rows.enter(row, waiting.pop(row))
        for token in rows.step():
            said.setdefault(token.row, []).append(token.id)
        for row, count in gone.items():
            if len(said.get(row, ())) >= count:
                rows.leave(row)
    assert said == {row: tokens[: gone.get(row)] for row, tokens in alone.items()}
    assert made.inside == []


def test_a_prompt_has_the_most_likely_tokens_of_each_step() -> None:
    model = Numbers()
    asked = Prompt([4], Sampling(max_tokens=3), top=2)
    first, *_ = found = list(Generator(model).generate([asked, Prompt([4], asked.sampling)]))
    logits_V = model.logits(np.array([4]))[-1]
    assert first.top[0] == (first.id, first.log_prob) == (first.id, log_prob(logits_V, first.id))
    assert [len(token.top) for token in found if token.row == 0] == [2, 2, 2]
    assert [token.log_prob for token in found if token.row == 1] == [None] * 3


def test_bytes_that_are_no_text_do_not_end_an_answer(tiny):
    """tokenizers raises an `Exception` for them; the stream begins anew."""
    tokenizer = load_tokenizer(tiny("llama"))
    text = AnswerText(tokenizer, (), ())
    right, seen = text._stream, []

    class Failing:
        def step(self, backend, token):
            seen.append(token)
            if len(seen) == 2:
                raise Exception("Invalid prefix encountered while decoding stream")
            return right.step(backend, token)

    text._stream = Failing()
    ids = tokenizer("abc", add_special_tokens=False)["input_ids"]
    assert not any(text.add(token) for token in ids)
    assert text.tokens == len(ids) and text.take(everything=True).startswith("a")
    assert text._stream is not right


def test_a_continued_text_keeps_the_blank_before_its_first_word() -> None:
    """Decoders of SentencePiece tokenizers such as Llama-2's drop the first blank of a text."""
    tokenizer = metaspace()
    prompt, said = tokenizer.encode("the cat"), tokenizer.encode(" sat down")
    for after, expected in ((prompt, " sat down"), ((), "sat down")):
        text = AnswerText(tokenizer, (), (), after=after)
        assert not any(text.add(token) for token in said)
        assert text.take(everything=True) == expected


def test_special_tokens_are_left_out_unless_they_are_shown() -> None:
    tokenizer = metaspace()
    call = tokenizer.convert_tokens_to_ids("[CALL]")
    for shown, expected in (((), "the cat"), ({call}, "the[CALL] cat")):
        text = AnswerText(tokenizer, (), (), shown=shown)
        for token in (*tokenizer.encode("the"), call, *tokenizer.encode("cat")):
            text.add(token)
        assert text.take(everything=True) == expected


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer of words, with the decoder of Llama-2's."""
    words = ["[UNK]", "▁the", "▁cat", "▁sat", "▁down", "[CALL]"]
    core = Tokenizer(WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1)])
    core.add_special_tokens(["[CALL]"])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_a_row_has_only_the_tokens_that_its_mask_allows() -> None:
    """Other rows are not masked, and log-probabilities are the model's."""
    model, sizes = Numbers(), []

    def even(size: int) -> np.ndarray:
        sizes.append(size)
        return np.arange(size) % 2 == 0

    for temperature in (0.0, 2.0):
        sampling = Sampling(max_tokens=8, temperature=temperature, logit_bias=((3, 100.0),))
        prompts = [Prompt([4], sampling, allowed=even), Prompt([4], sampling)]
        found = list(Generator(model).generate(prompts, log_probs=True))
        masked = [token.id for token in found if token.row == 0]
        assert len(masked) == 8 and not any(id % 2 for id in masked)
        assert [token.id for token in found if token.row == 1] == [3] * 8
        logits_V = model.logits(np.array([4]))[-1]
        assert found[0].log_prob == log_prob(logits_V, masked[0])
    assert sizes == [len(logits_V)] * 16
