"""Answers from tokens: their text, where they end, many at once, into a file that is continued."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from tests.run.numbers_model import Numbers
from vox_core.config import GenerateSettings, validate
from vox_core.contract import AdapterState, LoadJob, LowRank, Notice, RowByRow
from vox_core.data.tokenizer import end_of_turn_ids, load_tokenizer
from vox_core.errors import DataError, OutputError, StorageError
from vox_core.run.answers import answer_all, read_prompts
from vox_core.run.generate import Generator
from vox_core.run.load import OpenModel, _identity, prompt_text, prompt_tokens

SAY = [{"role": "user", "content": "x"}]
WARM = {"temperature": 1.0, "max_tokens": 6}
"""Settings under which each prompt has another answer."""


class Says(RowByRow):
    """A model that says a text, token by token, whatever the prompt is."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.said = tokens, 0

    def logits(self, tokens_T, adapter=None, first=0):
        logits_TV = np.zeros((len(tokens_T), 300), np.float32)
        logits_TV[-1, self.tokens[self.said]] = 1
        self.said += 1
        return logits_TV[first:]

    add_adapter = remove_adapter = log_probs = close = None  # type: ignore[assignment]


def greedy(**given: object) -> GenerateSettings:
    return validate(GenerateSettings, given)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(tiny("gpt2"))


@pytest.fixture
def model(tokenizer) -> Numbers:
    return Numbers(len(tokenizer))


@pytest.fixture
def opened(model, tokenizer) -> OpenModel:
    return OpenModel("m", Generator(model, 3), tokenizer, greedy(), positions=64)


@pytest.fixture
def prompts() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"prompt {number}"}] for number in range(7)]


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "pieces"),
    [
        ((), ["o", "n", "e", " ", "t", "w", "o", " ", "t", "w", "i"]),
        (("x",), ["o", "n", "e", " ", "t", "w", "o", " ", "t", "w", "i"]),
        (("two",), ["o", "n", "e", " "]),
        (("wi", "twig", "tw!"), ["o", "n", "e", " ", "two", " ", "t"]),
        (("o twi",), ["on", "e", " ", "t", "w"]),
        (("one",), []),
    ],
)
def test_an_answer_ends_before_a_stop_text_and_shows_none_of_it(tokenizer, stop, pieces):
    voice = Says(tokenizer("one two twi")["input_ids"])
    made = greedy(stop=stop, max_tokens=11)
    answer = OpenModel("m", Generator(voice), tokenizer, made).reply(SAY)
    ended = stop not in ((), ("x",))
    assert list(answer) == pieces
    assert answer.finish_reason == ("stop" if ended else "length")
    assert answer.prompt_tokens == len(prompt_tokens(tokenizer, SAY, None))
    assert answer.completion_tokens == voice.said


def test_an_answer_ends_with_the_turn(tiny):
    tokenizer = load_tokenizer(tiny("llama"))
    end = next(iter(end_of_turn_ids(tokenizer)))
    voice = Says([*tokenizer("yes", add_special_tokens=False)["input_ids"], end, 5])
    answer = OpenModel("m", Generator(voice), tokenizer, greedy()).reply(SAY)
    assert ("".join(answer), answer.finish_reason, answer.completion_tokens) == ("yes", "stop", 3)


def test_answers_end_at_the_models_window(opened, tokenizer):
    voice = Generator(Says(tokenizer("a")["input_ids"] * 64))
    answer = OpenModel("m", voice, tokenizer, greedy(max_tokens=1000), positions=64).reply(SAY)
    assert len("".join(answer)) == answer.completion_tokens == 64 - answer.prompt_tokens
    assert answer.finish_reason == "length"
    with pytest.raises(DataError, match="longer than the model can read"):
        opened.reply([{"role": "user", "content": "x" * 64}])


def test_answers_are_read_in_turns(opened, prompts):
    settings = greedy(**WARM)
    alone = ["".join(opened.reply(each, settings=settings)) for each in prompts[:2]]
    first, second = (opened.reply(each, settings=settings) for each in prompts[:2])
    said = ["", ""]
    for one, other in zip_longest(first, second, fillvalue=""):
        said[0] += one
        said[1] += other
    assert said == alone


# --- many -----------------------------------------------------------------------------------------


def test_many_answers_are_those_of_one_at_a_time_in_order(opened, prompts, model):
    settings = greedy(temperature=1, max_tokens=30, stop=list("0123456789"))
    found = list(answer_all(opened, prompts, settings))
    assert [each.row for each in found] == [1, 2, 3, 4, 5, 6, 7]
    assert max(map(len, model.batches)) == 3
    alone = [opened.reply(each, row, settings) for row, each in enumerate(prompts)]
    assert [each.answer for each in found] == ["".join(each) for each in alone]
    assert len({each.answer for each in found}) == 7
    assert [each.completion_tokens for each in found] == [each.completion_tokens for each in alone]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in alone]
    assert len({each.completion_tokens for each in found}) > 1, "or nothing was out of order"


def test_several_answers_to_each_prompt(opened, prompts):
    found = list(answer_all(opened, [prompts[0]] * 2, greedy(**WARM, n=2), n=2))
    assert [(each.row, each.index) for each in found] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert len({each.answer for each in found}) == 4


def test_progress_is_told(opened, prompts):
    told: list[str] = []

    def observe(event):
        assert isinstance(event, Notice)
        told.append(event.message)

    list(answer_all(opened, prompts, greedy(max_tokens=2), observe=observe))
    assert [text.split(" answers")[0] for text in told] == [f"{n}/7" for n in range(1, 8)]
    told.clear()
    list(answer_all(opened, prompts[:1] * 100, greedy(max_tokens=1), observe=observe))
    assert len(told) == 20


def test_a_prompt_that_is_too_long_is_named_before_any_work(opened, prompts, model):
    prompts[4] = [{"role": "user", "content": "x" * 64}]
    with pytest.raises(DataError) as caught:
        list(answer_all(opened, prompts, greedy()))
    assert (caught.value.code, caught.value.where) == ("VOX-D007", "prompt 5 of 7")
    assert model.batches == []


# --- into a file ----------------------------------------------------------------------------------


def into(out: Path, opened: OpenModel, prompts, **given: object) -> list:
    settings = greedy(**{**WARM, **given})
    return list(answer_all(opened, prompts, settings, n=settings.n, out=out))


def test_the_file_has_a_line_for_each_answer(opened, prompts, tmp_path):
    out = tmp_path / "new/answers.jsonl"
    found = into(out, opened, prompts)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["answer"] for line in lines] == [each.answer for each in found]
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert lines[0].keys() == {
        *("row", "index", "answer", "prompt_tokens", "completion_tokens"),
        *("finish_reason", "seed", "digest"),
    }


@pytest.mark.parametrize("kept", [0, 1, 4, 7])
@pytest.mark.parametrize("torn", [b"", b'{"row": 9, "ans', b"{"])
def test_an_interrupted_call_is_continued(opened, prompts, tmp_path, model, kept, torn):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    expected = into(whole, opened, prompts)
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:kept]) + torn)
    before = len(model.batches)
    assert into(out, opened, prompts) == expected
    assert out.read_bytes() == whole.read_bytes()
    assert (len(model.batches) == before) == (kept == 7), "nothing is computed again"


def test_an_interrupt_keeps_the_answers_before(opened, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    settings = greedy(**WARM)
    answers = answer_all(opened, prompts, settings, out=out)
    first = [next(answers), next(answers)]
    answers.close()
    assert len(out.read_bytes().splitlines()) == 2
    assert into(out, opened, prompts)[:2] == first


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"seed": 1}, "other settings"),
        ({"stop": ["x"]}, "other settings"),
        ({"n": 2}, "other settings"),
        ({"system": "Be brief."}, "line 1 answers another prompt"),
        ("prompt", "line 3 answers another prompt"),
        ("fewer", "more than the 2 answers"),
        ("model", "another model"),
    ],
)
def test_other_settings_prompts_or_models_are_refused(
    tiny, prompts, tmp_path, model, change, found
):
    out, tokenizer = tmp_path / "out.jsonl", load_tokenizer(tiny("llama"))
    opened = OpenModel("m", Generator(model), tokenizer, greedy())
    into(out, opened, prompts[:4])
    before, computed = out.read_bytes(), len(model.batches)
    if change == "prompt":
        prompts[2] = SAY
    elif change == "fewer":
        prompts = prompts[:2]
    elif change == "model":
        opened.identity = lambda: "other"
    with pytest.raises(OutputError) as caught:
        into(out, opened, prompts, **(change if isinstance(change, dict) else {}))
    assert caught.value.code == "VOX-O001"
    assert found in caught.value.found
    assert out.read_bytes() == before
    assert len(model.batches) == computed


@pytest.mark.parametrize("content", ["notes\n", '{"row": 1}\n', "[1, 2]\n", "\n"])
def test_a_file_of_other_things_is_left_alone(opened, prompts, tmp_path, content):
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(OutputError, match="other things than answers"):
        into(out, opened, prompts)
    assert out.read_text() == content


def test_a_disk_that_cannot_be_written_is_found_before_any_work(opened, prompts, tmp_path, model):
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(StorageError):
        into(tmp_path / "out.jsonl", opened, prompts)
    assert model.batches == []


def test_identity_covers_weights_adapter_and_precision(tiny):
    rng = np.random.default_rng(0)

    def adapter(alpha: float = 8.0, method="lora", zero: bool = False) -> AdapterState:
        B_OR = np.zeros((4, 2), np.float32) if zero else rng_B
        return AdapterState(method, {"q": LowRank(A_RI, B_OR, alpha)})

    A_RI = rng.normal(size=(2, 3)).astype(np.float32)
    rng_B = rng.normal(size=(4, 2)).astype(np.float32)
    base = tiny("gpt2")
    job = LoadJob(base, "fp32")
    same = [_identity(LoadJob(base, "fp32"), adapter()) for _ in range(2)]
    others = [
        _identity(job, None),
        _identity(LoadJob(base, "bf16"), adapter()),
        _identity(LoadJob(base, "fp32", "int8"), adapter()),
        _identity(LoadJob(tiny("llama"), "fp32"), adapter()),
        _identity(job, adapter(alpha=4.0)),
        _identity(job, adapter(method="rslora")),
        _identity(job, adapter(zero=True)),
    ]
    assert len({*same, *others}) == 1 + len(others)


# --- prompts --------------------------------------------------------------------------------------


def test_prompts_are_texts_or_conversations(tmp_path):
    file = tmp_path / "prompts.jsonl"
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"prompt": "Hi", "completion": "not used"},
        {"messages": SAY, "id": 7},
        {"prompt": [system, *SAY]},
        {"messages": [*SAY, {"role": "assistant", "content": "left out"}]},
    ]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_prompts(file) == [
        [{"role": "user", "content": "Hi"}],
        SAY,
        [system, *SAY],
        SAY,
    ]


def test_every_bad_line_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    bad = [
        "{",
        "[1]",
        '{"text": "x"}',
        '{"prompt": " "}',
        '{"prompt": 3}',
        '{"prompt": "x", "messages": []}',
        '{"messages": [{"role": "clown", "content": "x"}]}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": []}',
    ]
    file.write_text("\n".join(['{"prompt": "good"}', *bad]))
    with pytest.raises(DataError) as caught:
        read_prompts(file)
    assert caught.value.code == "VOX-D003"
    places = [fault.split(": ")[0] for fault in caught.value.faults]
    assert places == [*(f"{file}, line {line}" for line in range(2, 9)), f"{file}, line 9, 10"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "D001"), (b"\n \n", "D002"), (b"[{}]", "D003"), ("é".encode("utf-16"), "D003")],
)
def test_files_without_prompts(tmp_path, content, code):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_prompts(file)
    assert caught.value.code == f"VOX-{code}"


# --- scoring --------------------------------------------------------------------------------------


def test_an_open_model_scores_a_batch_with_its_adapter(model, tokenizer) -> None:
    asked = []
    model.log_probs = lambda batch, adapter: asked.append((batch, adapter)) or "log-probs"
    opened = OpenModel("m", Generator(model, 3), tokenizer, greedy(), adapter="mine")
    assert opened.log_probs("batch") == "log-probs"
    assert asked == [("batch", "mine")]


def test_the_text_of_a_prompt_is_what_its_tokens_are_of(tokenizer) -> None:
    text, special = prompt_text(tokenizer, SAY)
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert not special
    assert prompt_tokens(tokenizer, SAY, None) == tokenizer(text)["input_ids"]
