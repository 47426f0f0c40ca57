"""Carry a chat template over to Ollama, whose templates are Go's and not Jinja's.

Ollama does not run the Jinja template in a GGUF file: it compares its text with those of some known
models, and without a near one sends prompts as they are. So the Modelfile has the template in Go.

Of a template, vox takes the texts between the messages, by rendering conversations of sentinels,
and whether it trims the whitespace around a message. From these it puts a Go template together,
and the same in Python, which must give what the Jinja template gives for every conversation of
`_battery`: with and without a system message, of one turn and several, with whitespace, markup,
thoughts and empty messages. A template that differs in one of them is refused, such as one that
strips earlier thoughts or has the date in it. Tools are not carried over, and Ollama says so.

How Ollama reads it: https://github.com/ollama/ollama/blob/main/docs/template.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from vox_core.api.generating import prompt_text
from vox_core.api.tokenizers import template_source
from vox_core.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vox_export.vocabulary import Vocabulary

Messages: TypeAlias = "Sequence[Mapping[str, str]]"

_SENTINELS = ("7305918264", "4182650937", "5918264730", "2650937418")
_ONE = r'" " "\n" "\t" "\r" "\v" "\f" "\x1c" "\x1d" "\x1e" "\x1f"'
_TWO = r'"\u0085" "\u00a0"'
_THREE = " ".join(f'"\\u{n:04x}"' for n in (0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029))
_THREE += r' "\u202f" "\u205f" "\u3000"'
_TRIM = f"""\
{{{{- define "head" }}}}\
{{{{- if and (ge (len .) 1) (eq (slice . 0 1) {_ONE}) }}}}{{{{ template "head" (slice . 1) }}}}\
{{{{- else if and (ge (len .) 2) (eq (slice . 0 2) {_TWO}) }}}}\
{{{{- template "head" (slice . 2) }}}}\
{{{{- else if and (ge (len .) 3) (eq (slice . 0 3) {_THREE}) }}}}\
{{{{- template "head" (slice . 3) }}}}\
{{{{- else }}}}{{{{ template "tail" . }}}}{{{{ end }}}}{{{{ end }}}}\
{{{{- define "tail" }}}}\
{{{{- if and (ge (len .) 1) (eq (slice . (len (slice . 1))) {_ONE}) }}}}\
{{{{- template "tail" (slice . 0 (len (slice . 1))) }}}}\
{{{{- else if and (ge (len .) 2) (eq (slice . (len (slice . 2))) {_TWO}) }}}}\
{{{{- template "tail" (slice . 0 (len (slice . 2))) }}}}\
{{{{- else if and (ge (len .) 3) (eq (slice . (len (slice . 3))) {_THREE}) }}}}\
{{{{- template "tail" (slice . 0 (len (slice . 3))) }}}}\
{{{{- else }}}}{{{{ . }}}}{{{{ end }}}}{{{{ end }}}}"""
"""Go templates that write a text without the whitespace around it, one character at a time."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The texts of a template between the messages of a conversation.

    Args:
        user: before a conversation that begins with the user.
        system: before the system message, which comes first; None if it is refused.
        after_system: between it and the user's.
        assistant: between the user's and the assistant's; `again`: the other way.
        end: after the user's last message, up to where the assistant speaks.
        trimmed: roles whose messages lose the whitespace around them.
    """

    user: str
    system: str | None
    after_system: str
    assistant: str
    again: str
    end: str
    trimmed: frozenset[str] = frozenset()

    def render(self, messages: Messages) -> str:
        """Render as the Go template does."""
        before = {"": self.user, "system": self.after_system, "assistant": self.again}
        text, last = "", ""
        for message in messages:
            role, content = message["role"], message["content"]
            text += {
                "system": self.system or "",
                "user": before.get(last, ""),
                "assistant": self.assistant,
            }[role]
            text += content.strip() if role in self.trimmed else content
            last = role
        return text + self.end

    def go(self) -> str:
        """Return the Go template."""

        def content(role: str) -> str:
            trims = role in self.trimmed
            return '{{ template "head" .Content }}' if trims else "{{ .Content }}"

        return (
            (_TRIM if self.trimmed else "")
            + '{{- $before := "" }}{{- range .Messages }}'
            + f'{{{{- if eq .Role "system" }}}}{_literal(self.system or "")}{content("system")}'
            + f'{{{{- else if eq .Role "user" }}}}{{{{- if eq $before "" }}}}{_literal(self.user)}'
            + f'{{{{- else if eq $before "system" }}}}{_literal(self.after_system)}'
            + f"{{{{- else }}}}{_literal(self.again)}{{{{- end }}}}{content('user')}"
            + f'{{{{- else if eq .Role "assistant" }}}}{_literal(self.assistant)}'
            + f"{content('assistant')}{{{{- end }}}}{{{{- $before = .Role }}}}{{{{- end }}}}"
            + _literal(self.end)
        )


def modelfile(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, stops: frozenset[int], model: str
) -> str:
    """Return the Modelfile of a GGUF file.

    Args:
        stops: tokens that end an answer.
        model: name of the file, beside the Modelfile.

    Raises:
        ModelError: M002, Ollama cannot render the chat template.
    """
    go = "{{ .Prompt }}"
    if template_source(tokenizer) is not None:
        begin = vocabulary.tokens[vocabulary.special["bos"]] if vocabulary.add_bos else ""
        go = carried_over(tokenizer, begin).go()
    # Ollama takes what stands between the quotation marks as it is, without escapes.
    ends = [f'PARAMETER stop "{vocabulary.tokens[n]}"' for n in sorted(stops)]
    return "\n".join([f"FROM ./{model}", f'TEMPLATE """{go}"""', *ends]) + "\n"


def carried_over(tokenizer: PreTrainedTokenizerBase, begin: str = "") -> Pieces:
    """Return the pieces of a tokenizer's chat template.

    Args:
        begin: what Ollama puts before the text, which then is not to be in it.

    Raises:
        ModelError: M002, the pieces do not give what the template gives.
    """

    def jinja(messages: Messages) -> str | None:
        """Return what the template makes of a conversation; None if it refuses it."""
        try:
            return prompt_text(tokenizer, messages)[0]
        except DataError:
            return None

    if "strftime_now" in (template_source(tokenizer) or ""):
        raise _refused("the template has the date of each day in it")
    pieces = _pieces(jinja)
    for messages in _battery(pieces.system is not None):
        if (expected := jinja(messages)) is not None and pieces.render(messages) != expected:
            raise _refused(f"of {json.dumps(messages, ensure_ascii=False)} it makes {expected!r}")
    first = pieces.user if pieces.system is None else pieces.system
    if not (pieces.user.startswith(begin) and first.startswith(begin)):
        raise _refused(f"it does not begin with {begin}, which the tokenizer adds")
    user, system = pieces.user.removeprefix(begin), pieces.system
    return replace(pieces, user=user, system=system and system.removeprefix(begin))


def _pieces(jinja: Callable[[Messages], str | None]) -> Pieces:
    s, a, b, c = _SENTINELS
    several = _split(jinja(_talk(None, a, b, c)), a, b, c)
    first = _split(jinja(_talk(s, a)), s, a)
    if several is None:
        raise _refused("it does not contain what is said, in order")
    user, assistant, again, end = several
    trimmed = set()
    for role, talk in (
        ("system", _talk(" \n" + s + "\n ", a)),
        ("user", _talk(None, " \n" + a + "\n ", b, c)),
        ("assistant", _talk(None, a, " \n" + b + "\n ", c)),
    ):
        said = jinja(talk)
        sentinel = {"system": s, "user": a, "assistant": b}[role]
        if said is not None and f" \n{sentinel}\n " not in said:
            trimmed.add(role)
    return Pieces(
        user,
        first[0] if first else None,
        first[1] if first else "",
        assistant,
        again,
        end,
        frozenset(trimmed),
    )


def _split(text: str | None, *parts: str) -> list[str] | None:
    """Return the texts between the parts; None where they do not each stand once and in order."""
    if text is None or any(text.count(part) != 1 for part in parts):
        return None
    between = []
    for part in parts:
        before, found, text = text.partition(part)
        if not found:
            return None
        between.append(before)
    return [*between, text]


def _talk(system: str | None, *turns: str) -> list[dict[str, str]]:
    """Return a conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    whole = [{"role": roles[n % 2], "content": said} for n, said in enumerate(turns)]
    return ([] if system is None else [{"role": "system", "content": system}]) + whole


_SAID = (
    ("Hello", "Hi, how are you?", "Fine\n\nthanks"),
    (" leading and trailing \n", "\n\tindented\n", "\u00a0\u3000wide spaces\u2003"),
    ("<think>\nhm\n</think>\n\nYes", "<think>\nwell\n</think>\n\nNo", "</think>"),
    ("{{ x }} {% y %} {# z #}", "```py\nprint('{{ .Content }}')\n```", '"quoted" \\n \\ %s $x'),
    ("<|im_end|></s><bos>[INST] <start_of_turn>", "[/INST]<|eot_id|>", "日本語 👍🏽 äöü"),
    ("x", "", "y"),
)


def _battery(system: bool) -> Iterator[list[dict[str, str]]]:
    """Yield conversations; with system messages if those are carried over."""
    for said in _SAID:
        for one in (None, "Be brief.", " \n spaced \n", "") if system else (None,):
            yield _talk(one, said[0])
            yield _talk(one, *said)
            yield _talk(one, *said, "An answer", "Another question", said[1], "The last one")


def _literal(text: str) -> str:
    """Return a Go action that writes `text`."""
    if not text:
        return ""
    # A Modelfile ends a template at three quotation marks.
    spelled = json.dumps(text, ensure_ascii=False).replace('\\"', "\\u0022")
    return "{{- " + spelled + " }}"


def _refused(found: str) -> ModelError:
    return ModelError(
        "M002",
        "Ollama cannot render this model's chat template exactly",
        where="--to ollama",
        found=found,
        expected="one text before each message, whatever is said",
        remedy="use --to gguf with llama.cpp's server, which runs the template itself",
    )
