"""The data set that ships with vox: well-formed, honest and true of the commands.

Rows are grouped by topic, and a topic is recognised by its answer, which all of its questions
share. What an answer says in back-ticks is held against the commands and flags of vox. Nothing here
judges whether an answer is true in its prose, or needs the model.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest

import vox_core

DATA = Path(vox_core.__file__).parent / "quickstart" / "data"
FILES = ("train.jsonl", "valid.jsonl")

TRAIN_FLAGS = frozenset(
    {
        "--model",
        "--data",
        "--valid",
        "--out",
        "--backend",
        "--dtype",
        "--method",
        "--rank",
        "--alpha",
        "--dropout",
        "--targets",
        "--epochs",
        "--max-steps",
        "--batch-size",
        "--micro-batch-tokens",
        "--seq-len",
        "--lr",
        "--schedule",
        "--warmup",
        "--weight-decay",
        "--clip",
        "--seed",
        "--eval-every",
        "--save-every",
        "--resume",
        "--config",
        "--allow-cpu",
        "--json",
    }
)
COMMANDS: dict[str, frozenset[str]] = {
    "quickstart": frozenset(),
    "train": TRAIN_FLAGS,
    "merge": frozenset(),
    "chat": frozenset({"--adapter", "--temperature"}),
    "generate": frozenset({"--temperature"}),
    "model list": frozenset(),
    "model pull": frozenset(),
    "backend list": frozenset(),
    "config schema": frozenset(),
    "config show": frozenset(),
}
NAMES = frozenset(
    {
        "adapter_config.json",
        "adapter_model.safetensors",
        "telemetry.jsonl",
        "vox.toml",
        "vox_adapter.json",
        "messages",
        "prompt",
        "completion",
        "text",
        "smollm2-135m",
        "[train]",
    }
)
CALLS = ("PeftModel.from_pretrained(", "AutoModelForCausalLM.from_pretrained(")

# SmolLM2's own tokenizer, without the model here: its chat template with its default system prompt
# costs 32 tokens a row; the 29,529 characters of 231 rows made 8,388 tokens (3.52 each) beside it.
TEMPLATE_TOKENS = 32
CHARACTERS_PER_TOKEN = 3.5


class Row(NamedTuple):
    question: str
    answer: str


def read(name: str) -> list[Row]:
    """The rows of one file, each checked for its shape: one question, one answer, nothing else."""
    lines = (DATA / name).read_bytes().decode("utf-8", errors="strict").split("\n")
    assert lines.pop() == "", "the last line ends with a line feed"
    return [parse(line) for line in lines]


def parse(line: str) -> Row:
    row = json.loads(line)
    assert list(row) == ["messages"], line
    question, answer = row["messages"]
    assert (question["role"], answer["role"]) == ("user", "assistant"), line
    for message in (question, answer):
        assert set(message) == {"role", "content"}, line
        assert message["content"], line
        assert message["content"] == message["content"].strip(), line
    return Row(question["content"], answer["content"])


def words(question: str) -> tuple[str, ...]:
    """A question without case and punctuation."""
    return tuple(question.lower().translate(str.maketrans("", "", string.punctuation)).split())


def topics(rows: list[Row]) -> list[str]:
    """The answer of each run of neighbouring rows that share one."""
    return [answer for answer, _ in groupby(row.answer for row in rows)]


def quoted(answer: str) -> list[str]:
    return re.findall(r"`([^`]+)`", answer)


def command_of(span: str) -> str:
    """`vox model pull ID` -> `model pull`; a command that vox does not have fails."""
    _, first, *rest = span.split()
    name = f"{first} {rest[0]}" if first in {"model", "backend", "config"} else first
    assert name in COMMANDS, f"unknown command: {span}"
    return name


TRAIN, VALID = (read(name) for name in FILES)
ANSWERS = topics(TRAIN)


def test_sizes() -> None:
    assert 210 <= len(TRAIN) <= 240
    assert 40 <= len(VALID) <= 60
    assert 35 <= len(ANSWERS) <= 42


def test_the_training_set_is_small_enough_for_a_quick_start() -> None:
    """Under 16,000 tokens an epoch."""
    characters = sum(len(row.question) + len(row.answer) for row in TRAIN)
    assert TEMPLATE_TOKENS * len(TRAIN) + characters / CHARACTERS_PER_TOKEN < 16_000


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_short(answer: str) -> None:
    """15 to 45 tokens."""
    assert 15 <= len(answer) / CHARACTERS_PER_TOKEN <= 45


@pytest.mark.parametrize("rows", [TRAIN, VALID], ids=FILES)
def test_rows_are_grouped_by_topic(rows: list[Row]) -> None:
    seen = topics(rows)
    assert len(seen) == len(set(seen)), "the rows of a topic stand together"
    assert seen == [answer for answer in ANSWERS if answer in seen], "in the order of train.jsonl"


def test_every_topic_is_trained_often_enough_and_held_out_at_least_once() -> None:
    trained = Counter(row.answer for row in TRAIN)
    held_out = Counter(row.answer for row in VALID)
    assert min(trained.values()) >= 5
    assert held_out.keys() == trained.keys(), "the same topics, answered in the same words"
    assert max(held_out.values()) <= 2


def test_no_question_occurs_twice() -> None:
    counts = Counter(words(row.question) for row in TRAIN + VALID)
    assert [question for question, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("row", VALID, ids=lambda row: row.question)
def test_a_held_out_question_is_no_near_copy(row: Row) -> None:
    """At most three quarters of the words that two questions have between them are shared."""
    mine = set(words(row.question))
    for other in (set(words(row.question)) for row in TRAIN):
        assert len(mine & other) <= 0.75 * len(mine | other), other


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_an_answer_quotes_exists(answer: str) -> None:
    """Commands are vox's, a flag belongs to every command beside it, other names are known."""
    assert answer.count("`") % 2 == 0
    spans = quoted(answer)
    commands = [span for span in spans if span.startswith("vox ")]
    flags = {word for span in spans for word in span.split() if word.startswith("--")}
    for command in commands:
        assert flags <= COMMANDS[command_of(command)], command
    assert commands or not flags, "a flag without its command"
    for span in set(spans) - set(commands):
        assert span.startswith(("--", *CALLS)) or span in NAMES, span


@pytest.mark.parametrize("answer", ANSWERS)
def test_no_command_or_flag_stands_outside_back_ticks(answer: str) -> None:
    prose = re.sub(r"`[^`]+`", "", answer)
    first_words = "|".join(name.split()[0] for name in COMMANDS)
    assert "--" not in prose
    assert not re.search(rf"\bvox ({first_words})\b", prose)


def test_the_licence_is_named() -> None:
    assert "SPDX-License-Identifier: Apache-2.0" in (DATA / "LICENSE.md").read_text("utf-8")
