# ruff: noqa: E501 (templates are long)
"""Chat templates: what transformers would write, and never more than a rendering may take."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from vox_core.data import worker
from vox_core.data.messages import Message
from vox_core.data.render import Renderer
from vox_core.data.rows import Record
from vox_core.data.template import ChatTemplate, TemplateFault
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import DataError
from vox_testing.tiny import CHATML, write_tokenizer

CHAT = [{"role": "user", "content": "Hi\tyou"}, {"role": "assistant", "content": "there, 'x'"}]

SAME = [
    CHATML,
    "{% for m in messages -%}\n  {{ m.role | upper }}: {{ m['content'][:4] }}{{ loop.index }}\n{% endfor %}",
    "{% set ns = namespace(n=0, out='') %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.out = ns.out ~ m.content ~ ns.n %}{% endfor %}{{ ns.out }}",
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content | trim }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{{ bos_token }}{{ messages | tojson(indent=2) }}",
    "{% set parts %}{{ messages[0].content }}!{% endset %}{{ parts * 2 }}"
    "{{ messages | map(attribute='role') | join(', ') }}{{ '%s-%03d' | format('a', 7) }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content.split('\t') }}"
    "{{ m.content.replace('Hi', 'Ho') }}{{ '{:>5}'.format('a') }}{% endfor %}{{ nothing }}{{ none }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [1, 2] + [3] }}"
    "{{ dict(a=1) }}{{ (1, 2) }}{{ 7 // 2 }}{{ 2 ** 8 }}{{ range(3) | list }}{{ tools is none }}",
    "{{ 'a' + ('b' + 'c') + messages[0].content + '' }}{{ 1 + 2 * 3 + 4.5 }}{{ [1] + [2] + [[3]] }}"
    "{{ ('a' | escape) + '<' + '>' }}{{ 'a' + 'b' ~ 1 + 'c' }}{{ -1 + (2 - 3) + 4 }}",
    "{% for m in messages %}{{ loop.index0 + loop.length }}{{ loop.revindex }}{{ loop.depth }}"
    "{{ loop.previtem is defined }}{{ loop.no }}{{ loop.first }}{% endfor %}",
]


@pytest.mark.parametrize("source", SAME)
@pytest.mark.parametrize("prompt", [False, True])
def test_it_writes_what_transformers_writes(source: str, prompt: bool) -> None:
    (theirs,), _ = render_jinja_template(
        conversations=[CHAT], chat_template=source, add_generation_prompt=prompt, bos_token="<s>"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(CHAT, generation_prompt=prompt) == theirs
    assert template.render(CHAT, generation_prompt=prompt) == theirs


def test_generation_markers_are_found() -> None:
    source = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (text,), (stretches,) = render_jinja_template(
        conversations=[CHAT], chat_template=source, return_assistant_tokens_mask=True
    )
    assert ChatTemplate(source, {}).render_marked(CHAT) == (text, stretches)


TOO_MUCH = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "time within one operation": "{{ ('a' * 10**8 + 'b').replace('ab' * 10**7, 'c') * 10**10 }}",
    "memory": "{{ 'a' * 10**10 }}",
    "text": "{{ 'a' * 10**8 }}",
}


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_template_that_takes_too_much_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(worker, "SECONDS", 0.5)
        with pytest.raises(DataError, match="more time or memory") as caught:
            ChatTemplate(source, {}, "the chat template of models/x").render(CHAT)
    assert caught.value.where == "the chat template of models/x"
    assert "Hi" in ChatTemplate(CHATML, {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 'b' + 1 }}",
        "{{ messages.no + 'a' + 'b' }}",
        "{{ ['ab', 'cd'] | map('%sum') | list }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ messages.no.such }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 'open",
        "{% include 'x' %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_trips_over_is_its_fault(source: str) -> None:
    with pytest.raises(TemplateFault):
        ChatTemplate(source, {}).render(CHAT)


def test_a_long_conversation_has_a_long_text() -> None:
    chat = [{"role": "user", "content": "word " * 100_000} for _ in range(40)]
    assert len(ChatTemplate(CHATML, {}).render(chat)) > 20_000_000


def test_the_error_names_the_model_and_stops_the_rows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    source = "{% if messages | length == 3 %}{{ 'a' * 10**10 }}{% endif %}" + CHATML
    (tmp_path / "chat_template.jinja").write_text(source)
    renderer = Renderer(load_tokenizer(tmp_path))
    messages = tuple(Message(role, "x") for role in ("user", "assistant", "user"))
    with pytest.raises(DataError) as caught:
        renderer.render(Record("chat", tmp_path, 1, messages))
    assert caught.value.code == "VOX-D005"
    assert str(tmp_path) in str(caught.value.where)
