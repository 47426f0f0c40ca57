"""Chat templates as Ollama's: carried over exactly, or refused.

In Go's own text/template: benchmarks/ollama_template.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.golden.families import tokenizer

from vox_core.config import validate
from vox_core.errors import ModelError
from vox_core.run.load import prompt_text
from vox_core.run.train import train
from vox_export import llama_cpp
from vox_export.export import Job, export
from vox_export.ollama import carried_over, modelfile
from vox_export.settings import ExportSettings
from vox_export.vocabulary import Vocabulary

CARRIED = ("smollm2", "qwen2.5", "gemma3", "phi3", "phi4", "chatml", "zephyr")
REFUSED = {"llama3.2": "date", "qwen3": "think", "mistral-nemo": "Be brief.", "granite4": "system"}

STOPPED = Vocabulary(
    "gpt2", "gpt-2", ["a", "<\uff5cend▁of▁sentence\uff5c>"], [1, 3], (), (), {}, None, False, False
)


@pytest.mark.parametrize("name", CARRIED)
def test_a_template_is_carried_over(name) -> None:
    own = tokenizer(name)
    talk = [
        {"role": "user", "content": " Hello there\n"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": 'Say "x"'},
    ]
    pieces = carried_over(own)
    assert pieces.render(talk) == prompt_text(own, talk)[0]
    assert '"""' not in pieces.go()


@pytest.mark.parametrize(("name", "found"), REFUSED.items())
def test_a_template_that_cannot_be_carried_over_is_refused(name, found) -> None:
    with pytest.raises(ModelError) as caught:
        carried_over(tokenizer(name))
    assert found in caught.value.found


def test_what_the_tokenizer_adds_is_not_in_the_template() -> None:
    own = tokenizer("gemma3")
    assert carried_over(own).user.startswith("<bos><start_of_turn>")
    assert carried_over(own, "<bos>").user.startswith("<start_of_turn>")
    with pytest.raises(ModelError, match="exactly"):
        carried_over(tokenizer("chatml"), "<s>")


def test_whitespace_is_trimmed_where_the_template_trims() -> None:
    assert carried_over(tokenizer("gemma3")).trimmed == {"user", "assistant"}
    assert 'template "head"' in carried_over(tokenizer("gemma3")).go()
    assert carried_over(tokenizer("chatml")).trimmed == frozenset()


def test_a_file_is_named_after_the_last_part_of_a_hub_id() -> None:
    source: Any = SimpleNamespace(adapter=None, base=SimpleNamespace(id="org/model-1.5"))
    given: Any = SimpleNamespace(out=None, to="ollama")
    job = Job("org/model-1.5", given, source, tokenizer("chatml"), frozenset(), print)
    assert job.name == "model-1.5"


def test_a_stop_token_stands_in_the_modelfile_as_it_is() -> None:
    found = modelfile(tokenizer("chatml"), STOPPED, frozenset({1}), "x.gguf")
    assert found.splitlines()[-1] == 'PARAMETER stop "<\uff5cend▁of▁sentence\uff5c>"'


def test_a_folder_for_ollama(tiny, settings, monkeypatch) -> None:
    monkeypatch.setattr(llama_cpp, "engine", lambda: None)
    run = train(settings(tiny("llama"))).run
    report: Any = export(str(run), validate(ExportSettings, {"to": "ollama", "quant": "q8_0"}))
    lines = (report.out / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./run-q8_0.gguf"
    assert lines[1].startswith('TEMPLATE """{{- $before := "" }}')
    assert f"PARAMETER stop {json.dumps('<|im_end|>')}" in lines
    assert sorted(p.name for p in report.out.iterdir()) == [
        "Modelfile",
        "README.md",
        "proof.json",
        "run-q8_0.gguf",
    ]
