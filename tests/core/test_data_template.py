# ruff: noqa: E501 (templates are long)
"""Chat templates: what transformers would write, and never more than a rendering may take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from vox_core.data.records import Message, Record
from vox_core.data.render import Renderer
from vox_core.data.template import MAX_SOURCE, ChatTemplate, TemplateFault
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import DataError
from vox_core.testing.tiny import CHATML, write_tokenizer

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


DOUBLING = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{1}{{% endfor %}}{{{{ ns.x }}}}"
)
TOO_MUCH = {
    "times": "{{ 'a' * 10**10 }}",
    "a list times": "{{ [0] * 10**9 }}",
    "bytes": "{{ 'x'.encode() * 10**10 }}",
    "power": "{{ 10 ** (10**8) }}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that takes nothing": "{% for i in range(99999) %}{% for j in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "loops over a list": "{% set l = range(9999) | list %}{% for i in l %}{% for j in l %}"
    "{% endfor %}{% endfor %}",
    "a large range": "{% for i in range(10**9) %}x{% endfor %}",
    "output": "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width in a filter": "{{ '%1000000000d' | format(1) }}",
    "a width in format": "{{ '{:>1000000000}'.format(1) }}",
    "a width that is given": "{{ '{:{}}'.format(1, 10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(99999) }}",
    "translate": "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
    "indent": "{{ ('a\n' * 1000) | indent(99999) }}",
    "JSON's indent": "{{ messages | tojson(indent=10**9) }}",
    "characters": "{{ ('a' * 1000000) | list | length }}",
    "a generator": "{{ range(99999) | map('center', 99999) | join }}",
    "~": DOUBLING.format("'ab'", "{% set ns.x = ns.x ~ ns.x %}"),
    "+": DOUBLING.format("'ab'", "{% set ns.x = ns.x + ns.x %}"),
    "+ of three": DOUBLING.format("'ab'", "{% set ns.x = ns.x + 'c' + ns.x %}"),
    "a block": DOUBLING.format("'ab'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "lists in lists": DOUBLING.format("[1]", "{% set ns.x = [ns.x, ns.x] %}"),
    "tuples in tuples": DOUBLING.format("(1,)", "{% set ns.x = (ns.x, ns.x) %}"),
    "replace": DOUBLING.format("'ab'", "{% set ns.x = ns.x.replace('a', ns.x) %}"),
    "the filter replace": DOUBLING.format("'ab'", "{% set ns.x = ns.x | replace('a', ns.x) %}"),
    "join": DOUBLING.format("'ab'", "{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}"),
    "slices kept": DOUBLING.format("[]", "{% for j in range(9999) %}"
    "{% set ns.x = ns.x + ['a' * 9999] %}{% endfor %}"),
}  # fmt: skip


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_template_that_takes_too_much_is_stopped(source: str) -> None:
    before = time.process_time()
    with pytest.raises(TemplateFault) as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert caught.value.too_much, caught.value
    assert time.process_time() - before < 8


def test_calls_that_double_are_stopped() -> None:
    source = (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    )
    with pytest.raises(TemplateFault) as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert caught.value.too_much


def test_memory_stays_low(tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text(json.dumps(list(TOO_MUCH.values())))
    code = (
        "import json, resource, sys\n"
        "from vox_core.data.template import ChatTemplate, TemplateFault\n"
        "ChatTemplate('', {}).render([])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for source in json.load(open(sys.argv[1])):\n"
        "    try: ChatTemplate(source, {}).render([])\n"
        "    except TemplateFault: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "all.json"],
        capture_output=True,
        text=True,
        check=True,
    )
    per_kib = 1 if sys.platform != "darwin" else 1024
    assert int(done.stdout) / per_kib < 400 * 1024


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
        "{{ lipsum(1) }}",
        "x" * (MAX_SOURCE + 1),
    ],
)
def test_what_a_template_trips_over_is_its_fault(source: str) -> None:
    with pytest.raises(TemplateFault):
        ChatTemplate(source, {}).render(CHAT)


def test_a_long_conversation_has_a_budget_that_goes_with_it() -> None:
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
