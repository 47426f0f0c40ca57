"""Rows of preferences as documents, read by the core as rows of supervised training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from vox_core.api.rows import Record, read_row
from vox_core.contract import ObjectiveSpec
from vox_objectives import vox_objective

ASK = {"role": "user", "content": "Hi?"}
GOOD = {"role": "assistant", "content": "Hello."}
BAD = {"role": "assistant", "content": "No."}
DPO, KTO = (vox_objective(ObjectiveSpec(name)) for name in ("dpo", "kto"))


def said(document: Mapping[str, object]) -> list[tuple[str, str, bool]]:
    """Role, text and whether it is trained, of each message of a document."""
    record: Record = read_row(json.dumps(document).encode())
    return [
        (message.role, message.content, message.role == "assistant" and message.weight != 0)
        for message in record.messages or ()
    ]


def trained(*turns: tuple[str, str]) -> list[tuple[str, str, bool]]:
    """Messages, of which the last one is trained."""
    return [(*turn, turn is turns[-1]) for turn in turns]


HI = ("user", "Hi?")
PAIRS: dict[str, dict[str, Any]] = {
    "explicit": {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."},
    "instruction": {"instruction": "Hi?", "chosen": "Hello.", "rejected": "No."},
    "question": {"question": "Hi?", "chosen": "Hello.", "rejected": "No."},
    "implicit": {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "implicit with the prompt again": {
        "prompt": "Hi?",
        "chosen": [ASK, GOOD],
        "rejected": [ASK, BAD],
    },
    "answers alone": {"prompt": "Hi?", "chosen": [GOOD], "rejected": [BAD]},
    "messages": {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    "messages and texts": {"prompt": [ASK], "chosen": "Hello.", "rejected": "No."},
    "with the chat beside it": {
        "messages": [ASK, GOOD],
        "prompt": "Hi?",
        "chosen": "Hello.",
        "rejected": "No.",
    },
    "ShareGPT": {
        "chosen": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}],
        "rejected": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "No."}],
    },
    "ShareGPT answers": {
        "prompt": "Hi?",
        "chosen": [{"from": "gpt", "value": "Hello."}],
        "rejected": [{"from": "gpt", "value": "No."}],
    },
}


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("objective", [DPO, KTO])
def test_forms_of_pairs(objective: Any, form: str) -> None:
    documents = objective.examples(PAIRS[form])
    assert list(documents) == ["chosen", "rejected"]
    assert said(documents["chosen"]) == trained(HI, ("assistant", "Hello."))
    assert said(documents["rejected"]) == trained(HI, ("assistant", "No."))


def test_an_instruction_keeps_its_input() -> None:
    row = {"instruction": "Add.", "input": "1, 2", "chosen": "3", "rejected": "4"}
    assert said(DPO.examples(row)["chosen"]) == trained(
        ("user", "Add.\n\n1, 2"), ("assistant", "3")
    )


def test_only_what_differs_is_trained() -> None:
    start = [ASK, GOOD, {"role": "user", "content": "Well?"}]
    row = {"chosen": [*start, GOOD], "rejected": [*start, BAD]}
    before = (HI, ("assistant", "Hello."), ("user", "Well?"))
    assert said(DPO.examples(row)["rejected"]) == trained(*before, ("assistant", "No."))


def test_a_call_before_the_answers_is_not_trained() -> None:
    call = {"from": "function_call", "value": '{"name": "look", "arguments": {}}'}
    start = [{"from": "human", "value": "Hi?"}, call, {"from": "observation", "value": "1"}]
    row = {name: [*start, {"from": "gpt", "value": name}] for name in ("chosen", "rejected")}
    record = read_row(json.dumps(DPO.examples(row)["chosen"]).encode())
    assert record.messages
    weights = [each.weight for each in record.messages if each.role == "assistant"]
    assert weights == [0, None]


def test_a_weight_within_the_prompt_does_not_count() -> None:
    ask = {**ASK, "train": True}
    row = {"chosen": [ask, GOOD], "rejected": [ask, BAD]}
    assert said(DPO.examples(row)["chosen"]) == trained(HI, ("assistant", "Hello."))


def test_tools_and_attributes_stay() -> None:
    row = {**PAIRS["implicit"], "rating": 3, "tools": [], "category": "greetings"}
    for document in DPO.examples(row).values():
        assert (document["rating"], document["category"], document["tools"]) == (3, "greetings", [])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi?", "chosen": "Hello."}, 'no "rejected"'),
        ({"prompt": "Hi?", "rejected": "No.", "chosen": None}, 'no "chosen"'),
        ({"prompt": "Hi?", "completion": "Hello."}, 'no "chosen"'),
        ({"prompt": "Hi?", "chosen": "No.", "rejected": "No."}, "two answers"),
        ({"chosen": [ASK, BAD], "rejected": [ASK, BAD]}, "two answers"),
        ({"chosen": "Hello.", "rejected": "No."}, 'no "prompt"'),
        ({"prompt": "Hi?", "chosen": "Hello.", "rejected": [BAD]}, "two of a kind"),
        ({"prompt": "Hi?", "chosen": 3, "rejected": "No."}, "neither a text nor a list"),
        ({"prompt": "Hi?", "chosen": [], "rejected": [BAD]}, "neither a text nor a list"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "different prompts"),
        ({"chosen": [ASK, GOOD, ASK], "rejected": [ASK, BAD]}, '"chosen" without an answer'),
    ],
)
def test_wrong_pairs(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPO.examples(row)


@pytest.mark.parametrize(
    ("label", "side"), [(True, "chosen"), (False, "rejected"), (1, "chosen"), (0, "rejected")]
)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi?", "completion": "Hello."},
        {"prompt": [ASK], "completion": [GOOD]},
        {"messages": [ASK, GOOD]},
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]},
    ],
)
def test_unpaired_rows(row: dict[str, Any], label: bool, side: str) -> None:
    documents = KTO.examples({**row, "label": label})
    assert list(documents) == [side]
    assert said(documents[side]) == trained(HI, ("assistant", "Hello."))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi?", "completion": "Hello."}, "found no label"),
        ({"prompt": "Hi?", "completion": "Hello.", "label": "good"}, "found the label 'good'"),
        ({"prompt": "Hi?", "completion": "Hello.", "label": 2}, "found the label 2"),
        ({"prompt": "Hi?", "label": True}, "found no answer"),
        ({"completion": "Hello.", "label": True}, 'no "prompt"'),
        ({"messages": [ASK], "label": True}, "without an answer"),
    ],
)
def test_wrong_unpaired_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KTO.examples(row)


@pytest.mark.parametrize("form", PAIRS)
def test_mismatched_documents(form: str) -> None:
    other = {"prompt": "Bye?", "completion": "So long.", "label": True}
    kl = KTO.mismatched(PAIRS[form], other)["kl"]
    assert said(kl) == trained(HI, ("assistant", "So long."))
    kl = KTO.mismatched(other, PAIRS[form])["kl"]
    assert said(kl) == trained(("user", "Bye?"), ("assistant", "Hello."))
