"""The table of what may be found of the masks of a data set.

`docs/guide/looking-at-data.md` publishes it, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding: an error stops the run before it starts, a warning is told, and an info
    stands in `preflight.json` and in the preview.

    Args:
        what: what is so, of the rows that are named beside it.
        means: what it does to the model.
        remedy: the next step.
    """

    level: Level
    what: str
    means: str
    remedy: str


FINDINGS: dict[str, Kind] = {
    "outside-vocabulary": Kind(
        "error",
        "a token that the model has no embedding for",
        "training fails there, or reads what is not the model's",
        "use the tokenizer that belongs to the model: its ids must be below vocab_size of "
        "config.json",
    ),
    "system-trained": Kind(
        "error",
        "the system prompt is trained",
        "the model learns to recite its instructions",
        "set {% generation %} in the chat template around the assistant's words alone",
    ),
    "prompt-trained": Kind(
        "error",
        "what the user or a tool says is trained",
        "the model learns to ask, not to answer",
        "set {% generation %} in the chat template around the assistant's words alone",
    ),
    "no-end": Kind(
        "warning",
        "no end-of-turn token is trained",
        "the model does not learn to stop",
        "use a chat template that closes each turn with a special token, or a tokenizer with an "
        "eos_token",
    ),
    "cut-in-answer": Kind(
        "warning",
        "cut at --seq-len in the middle of an answer",
        "the model learns a beginning without its end",
        "raise --seq-len, or shorten these rows",
    ),
    "cut-before-answer": Kind(
        "warning",
        "dropped: the first answer begins beyond --seq-len",
        "nothing of the row is trained",
        "raise --seq-len, or shorten what comes before the answers",
    ),
    "nothing-trained": Kind(
        "warning",
        "dropped: no token of it would be trained",
        "nothing of the row is trained",
        "give the assistant something to say, or remove these rows",
    ),
    "rendered-text": Kind(
        "warning",
        'a "text" row holds the chat template\'s own tokens',
        "a conversation as text is trained whole, questions and system prompt too",
        'write it as {"messages": […]}, and vox renders it and trains the answers',
    ),
    "double-bos": Kind(
        "warning",
        "begins with two beginning-of-sequence tokens",
        "the model is never asked with that, and answers worse",
        "remove the token from the text, or from the chat template",
    ),
    "serving-differs": Kind(
        "warning",
        "the prompt that the model will be asked with is not how the trained text begins",
        "the model answers prompts that it was not trained on",
        "look at one with vox data preview --row, and correct the chat template",
    ),
    "few-trained": Kind(
        "warning",
        "less than 1 % of the tokens is trained",
        "nearly all time goes into what is only read",
        "shorten the prompts, or split long conversations",
    ),
    "no-template": Kind(
        "info",
        "the model has no chat template",
        "prompts and completions are laid end to end, and nothing says where a turn begins",
        "name one with --template chatml, or use an -instruct model",
    ),
    "no-markers": Kind(
        "info",
        "the chat template has no {% generation %} markers",
        "vox finds by itself where answers begin and end, and refuses rows where that is unclear",
        "nothing needs to be done; look at some rows with vox data preview",
    ),
}
FEW_TRAINED = 0.01
