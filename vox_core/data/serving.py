"""Whether a model is trained on what a server will send it.

A server renders the messages so far with the generation prompt, and the model goes on from there.
Where that text is no prefix of the one that is trained, the model is trained to go on from
something that it will never see: most often because the template opens a thought in the prompt
which it leaves out of turns that are there already, or because it moves the system prompt or the
tools to the last user's turn.

Nothing is tokenised here, and nothing judged: a template that strips the thinking of earlier turns
differs from a server by design.
"""

from __future__ import annotations

import re

from vox_core.data.records import Record
from vox_core.data.render import Renderer, weight_of
from vox_core.data.turns import common

_SHOWN = 40
_WORD = re.compile(r"[<\[]?[^\s<\[]*$")
"""The last word or special token of a text, begun or empty."""


def serving_difference(renderer: Renderer, record: Record) -> str | None:
    """What differs before the first turn where something does; None if nothing does.

    Looked at are the assistant's turns that are trained.

    Raises:
        RenderError: the record cannot be rendered.
    """
    if record.messages is None or renderer.template is None or record.kind == "preference":
        return None
    text = renderer.render(record).text
    found = [
        difference
        for turn, message in enumerate(record.messages)
        if message.role == "assistant" and weight_of(message)
        if (difference := _difference(renderer.prompt(record, turn), text, turn))
    ]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + more if found else None


def _difference(prompt: str | None, text: str, turn: int) -> str | None:
    if turn == 0:
        return None  # nobody asked
    if prompt is None:
        return f"a server could not ask for messages[{turn}]: the template refuses those before it"
    if text.startswith(prompt):
        return None
    at = _WORD.search(text[: common(prompt, text)]).start()  # type: ignore[union-attr]
    sent, trained = (repr(one[at : at + _SHOWN]) for one in (prompt, text))
    return f"before messages[{turn}] a server sends {sent} where the model is trained on {trained}"
