"""Which tokens of a choice and of a text are scored, with a tokenizer that joins characters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vox_core.api.generating import GenerateSettings, Question, Sampling, open_model
from vox_core.errors import DataError
from vox_core.run import load
from vox_eval import evaluation
from vox_eval.evaluation import Document, _ends, _windows, log_probs
from vox_eval.scorer import Example

START, END = "<s>", "</s>"


@dataclass
class Words:
    """A tokenizer whose tokens are words with the blank before them. Ids are texts."""

    bos_token_id: str | None = None
    eos_token_id: str | None = None
    begins: bool = False
    """Whether it puts the BOS token before a text by itself."""
    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[Any]]:
        tokens = re.findall(r" ?\w+|\W", text)
        front = [self.bos_token_id] if self.begins and add_special_tokens else []
        return {"input_ids": [*front, *tokens]}


@dataclass
class Model:
    tokenizer: Words
    positions: int | None = None


def ends(tokenizer: Words, prompt: str, *choices: str) -> list[tuple[list[Any], int]]:
    example = Example("id", {}, [{"role": "user", "content": prompt}], choices=choices)
    return [(list(each.tokens), each.first) for each in _ends(Model(tokenizer), example)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "choice", "expected"),
    [
        ("The sky is", " very blue", (["The", " sky", " is", " very", " blue"], 3)),
        ("The sky is ", "blue", (["The", " sky", " is", " blue"], 3)),
        ("The sky is", "land", (["The", " sky", " island"], 2)),  # joined with the prompt's end
        ("is", "land here", ([END, "island", " here"], 1)),  # nothing is left of the prompt
    ],
)
def test_a_choice_is_tokenised_with_its_prompt(prompt, choice, expected) -> None:
    assert ends(Words(eos_token_id=END), prompt, choice) == [expected]


def test_the_choices_of_a_row_are_scored_from_the_same_place() -> None:
    """Of which one is joined with the prompt's blank, and the other is not."""
    assert ends(Words(), "The sky is ", "blue", "!") == [
        (["The", " sky", " is", " blue"], 3),
        (["The", " sky", " is", " ", "!"], 3),
    ]


def test_a_tokenizers_own_start_is_not_doubled() -> None:
    own = Words(bos_token_id=START, begins=True)
    assert ends(own, "is", "land") == [([START, "island"], 1)]
    assert ends(own, "It", " is") == [([START, "It", " is"], 2)]


def test_a_choice_that_does_not_fit() -> None:
    example = Example("id", {}, [{"role": "user", "content": "a b"}], choices=(" c", " d"))
    with pytest.raises(DataError, match="longer than the model can read"):
        _ends(Model(Words(), positions=2), example)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Words(bos_token_id=START), [[START, "a", " b"], [" b", " c"]]),
        (Words(bos_token_id=START, begins=True), [[START, "a", " b"], [" b", " c"]]),
        (Words(eos_token_id=END), [[END, "a", " b"], [" b", " c"]]),
        (Words(), [["a", " b", " c"]]),
    ],
)
def test_windows_of_a_text(monkeypatch, tokenizer, expected) -> None:
    def tokens(found: list[Document]) -> list[list[Any]]:
        assert {each.first for each in found} == {1}
        return [list(each.tokens) for each in found]

    assert tokens(_windows(Model(tokenizer, positions=3), "a b c")) == expected  # type: ignore[arg-type]
    monkeypatch.setattr(evaluation, "WINDOW", 3)
    assert tokens(_windows(Model(tokenizer, positions=9), "a b c")) == expected  # type: ignore[arg-type]


def test_a_single_token_without_anything_before_it_has_no_likelihood() -> None:
    with pytest.raises(DataError, match="a text of a single token"):
        _windows(Model(Words()), "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("together", [256, 4])
def test_a_given_answer_has_the_log_probabilities_of_its_text(llama, monkeypatch, together) -> None:
    """And is the greedy one if the model generates it; in one pass, or row by row."""
    monkeypatch.setattr(load, "GIVEN_TOKENS", together)
    prompts = [[5, 9, 30, 12], [7, 8], [40, 41, 42]]
    with open_model(str(llama), GenerateSettings(backend="cpu", dtype="fp32")) as model:
        asked = [Question(each, Sampling(max_tokens=3), ()) for each in prompts]
        replies = dict(model.replies(asked))
        pairs = [(each, replies[at].tokens) for at, each in enumerate(prompts)]
        pairs += [(each, [*tokens[:-1], tokens[-1] ^ 1]) for each, tokens in pairs]
        found = model.given(pairs)
        documents = [Document([*each, *answer], len(each)) for each, answer in pairs]
        expected = log_probs(model, documents)
        most = model.positions
        assert most is not None
        model.given([([5], [6] * most)])
        for pair, code in (
            (([], [1]), "D003"),
            (([1], []), "D003"),
            (([5, 5], [6] * most), "D007"),
        ):
            with pytest.raises(DataError) as caught:
                model.given([pairs[0], pair])
            assert caught.value.code == f"VOX-{code}"
    assert [greedy for _, greedy in found] == [True] * 3 + [False] * 3
    for (own, _), other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
