"""The conversations of the golden files, as rows of a data file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tests.golden.families import FAMILIES
from vox_core.data.messages import Message
from vox_core.data.rows import Record, parse_row

SOURCE = Path("golden.jsonl")
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "at": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _calls(*cities: str, content: str | None = None) -> dict[str, Any]:
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": city, "at": 1732269600}},
        }
        for number, city in enumerate(cities)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _returned(content: str, number: int = 0) -> dict[str, Any]:
    name, id = "get_weather", f"call{number:05}"
    return {"role": "tool", "tool_call_id": id, "name": name, "content": content}


_ASKED = [_user("Is it warm in Köln?"), _calls("Köln"), _returned('{"celsius": 21}')]

CASES: dict[str, dict[str, Any]] = {
    "several turns": {
        "messages": [
            _user("Hello there"),
            _said("Hello, how may I help?"),
            _user("What is 2 + 2?"),
            _said("It is 4.\n\nAnything else?"),
        ]
    },
    "a system prompt": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            _user("Hello"),
            _said("Hello."),
            _user("Name a colour"),
            _said("Blue."),
        ]
    },
    "an empty answer": {
        "messages": [_user("Say nothing."), _said(""), _user("And now?"), _said("Now I speak.")]
    },
    "weights": {
        "messages": [
            _user("One"),
            _said("not trained", weight=0),
            _user("Two"),
            _said("trained by half", weight=0.5),
            {**_user("Three, trained"), "train": True},
            _said("trained"),
        ]
    },
    "a call and its answer": {
        "tools": [_WEATHER],
        "messages": [*_ASKED, _said("Yes, it is 21 degrees.")],
    },
    "calls in an earlier exchange": {
        "tools": [_WEATHER],
        "messages": [
            *_ASKED,
            _said("Yes, it is 21 degrees."),
            _user("And in Bonn?"),
            _calls("Bonn"),
            _returned("no data"),
            _said("I cannot tell."),
        ],
    },
    "two calls at once": {
        "tools": [_WEATHER],
        "messages": [
            _user("Köln or Bonn?"),
            _calls("Köln", "Bonn"),
            _returned("21"),
            _returned("19", 1),
            _said("Köln."),
        ],
    },
    "words beside a call": {
        "tools": [_WEATHER],
        "messages": [
            _user("Is it warm in Köln?"),
            _calls("Köln", content="I look."),
            _returned("21"),
            _said("Yes."),
        ],
    },
    "a call without tools": {"messages": [*_ASKED, _said("Yes, it is 21 degrees.")]},
    "two calls without tools": {
        "messages": [
            _user("Köln or Bonn?"),
            _calls("Köln", "Bonn"),
            _returned("21"),
            _returned("19", 1),
            _said("Köln."),
        ]
    },
    "reasoning": {
        "messages": [
            _user("Is 7 prime?"),
            _said("Yes.", reasoning_content="7 has no divisor."),
            _user("And 8?"),
            _said("No.", reasoning_content="8 is 2 times 4."),
        ]
    },
    "reasoning in the content": {
        "messages": [
            _user("Is 7 prime?"),
            _said("<think>\n7 has no divisor.\n</think>\n\nYes."),
            _user("And 8?"),
            _said("<think>\n8 is 2 times 4.\n</think>\n\nNo."),
        ]
    },
}


def record(case: str) -> Record:
    """The case as vox reads it. An empty answer is no row of a data file, so that case is not."""
    row = CASES[case]
    if case == "an empty answer":
        said = tuple(Message(one["role"], one["content"]) for one in row["messages"])
        return Record("chat", SOURCE, 1, said)
    return parse_row(copy.deepcopy(row), SOURCE, 1)


def given(case: str, family: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and tools for `apply_chat_template`."""
    row = copy.deepcopy(CASES[case])
    if FAMILIES[family].text_arguments:
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                written = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"]["arguments"] = written
    return row["messages"], row.get("tools")
