"""Whether the model is asked with the text that it was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.data.records import Record
from vox_core.data.render import Renderer

if TYPE_CHECKING:
    from vox_core.data.messages import Message

_SHOWN = 40


def serving_difference(renderer: Renderer, record: Record) -> str | None:
    """How what comes before an answer differs between the trained text and the prompt that the
    model is given to answer; None where it does not, or the row is not rendered by a template.

    Raises:
        RenderError: the template refuses the row.
    """
    if record.messages is None or renderer.template is None:
        return None
    text = renderer.render(record).text
    for turn, message in enumerate(record.messages):
        if message.role == "assistant" and (
            found := _differs(renderer, record.messages, turn, text)
        ):
            return found
    return None


def _differs(renderer: Renderer, chat: tuple[Message, ...], turn: int, text: str) -> str | None:
    prompt = renderer._prompt(chat[:turn])
    if prompt is None or text.startswith(prompt):
        return None
    pairs = zip(prompt, text, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(text)))
    asked, trained = (repr(each[at : at + _SHOWN]) for each in (prompt, text))
    return f"before messages[{turn}] the model is asked with {asked}, and trained with {trained}"
