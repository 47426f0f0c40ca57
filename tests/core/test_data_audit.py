"""The audit of masks: a data file for each finding, and nothing found of sound data."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.core.data_samples import build_dataset, load_records
from tests.core.tiny_tokenizer import (
    FAMILIES,
    GENERATION,
    make_tokenizer,
    tiny_tokenizer,
)
from vox_core.contract import SFT, ObjectiveSpec
from vox_core.data import dataset_cache
from vox_core.data.audit import FINDINGS, Audit, audit, require_sound, vocabulary_of
from vox_core.data.checked import check_files
from vox_core.data.encode import EncodeStats
from vox_core.data.rows import answers_for, objective_of
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import DataError

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "looking-at-data.md"

SOUND = ("how?", "so")
# Everything that is said lies between the markers, whoever says it.
ALL_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% generation %}{{ message['content'] }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM_MARKED = ALL_MARKED.replace(
    "{% generation %}", "{% if message.role != 'user' %}{% generation %}"
).replace("{% endgeneration %}", "{% endgeneration %}{% endif %}")
# An answer of "secret" is left out of what is marked.
NOT_SECRET = GENERATION.replace(
    "{% if message['role'] == 'assistant' %}",
    "{% if message['role'] == 'assistant' and message['content'] != 'secret' %}",
)


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(turns)
    said = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, *said]}


@dataclass(frozen=True)
class Case:
    """Rows of which the second has the finding."""

    bad: dict[str, Any]
    family: str = "chatml"
    template: str | None = None
    vocabulary: int | None = None
    seq_len: int = 256
    objective: ObjectiveSpec = SFT


CASES = {
    "outside-vocabulary": Case(chat("日本 äöü", "x"), vocabulary=360),
    "system-trained": Case(chat(*SOUND, system="Be brief."), "generation", SYSTEM_MARKED),
    "prompt-trained": Case(chat("a question", "a word"), "generation", ALL_MARKED),
    "no-end": Case(chat("a", "b", "c"), "last_closed"),
    "joined-answer": Case({"prompt": "say ", "completion": "hello there"}, "base"),
    "no-answer": Case({"prompt": "how?"}, objective=ObjectiveSpec("grpo")),
    "cut-in-answer": Case(chat("how?", "a number " * 400)),
    "prompt-too-long": Case(chat("a number " * 400, "so")),
    "nothing-trained": Case(chat("how?", "secret"), "generation", NOT_SECRET),
    "rendered-text": Case({"text": "<|im_start|>user\nhow?<|im_end|>\n"}),
    "double-bos": Case({"text": "<s>the answer"}, "base_with_bos"),
    "serving-differs": Case(chat("a", "b", "c", "d"), "qwen3_open"),
    "few-trained": Case(chat("a number " * 400, "so"), seq_len=9999),
    "no-template": Case({"text": "the word"}, "base"),
    "no-markers": Case(chat(*SOUND)),
}
OF_THE_WHOLE = {"few-trained", "no-template", "no-markers"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))


@cache
def tokenizer(family: str, template: str | None) -> Any:
    if template is None:
        return tiny_tokenizer(family)
    return make_tokenizer(replace(FAMILIES[family], template=template))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def sound_row(case: Case) -> dict[str, Any]:
    if case.family.startswith("base"):
        return {"prompt": "how?", "completion": "so"}
    return chat("ok", "secret one") if case.template == NOT_SECRET else chat(*SOUND)


def opened(data: Path, case: Case, tmp_path: Path, **options: Any) -> Any:
    model = tmp_path / "model"
    tokenizer(case.family, case.template).save_pretrained(model)
    checked = check_files([data], answers=answers_for(objective_of(case.objective)))
    return dataset_cache.open_dataset(
        checked,
        model,
        lambda: load_tokenizer(model),
        case.seq_len,
        **{"objective": case.objective, **options},
    )


def audited(data: Path, case: Case, tmp_path: Path) -> Audit:
    return audit(opened(data, case, tmp_path), case.vocabulary, case.seq_len)


@pytest.mark.parametrize("name", FINDINGS)
def test_each_finding_is_found_where_it_stands(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    rows = [case.bad] if name in OF_THE_WHOLE else [sound_row(case), case.bad]
    data = write(tmp_path / "rows.jsonl", *rows)
    found = {each.id: each for each in audited(data, case, tmp_path).findings}
    finding = found[name]
    assert finding.kind is FINDINGS[name]
    if name in OF_THE_WHOLE:
        assert (finding.rows, finding.places) == (None, ())
    elif name in ("system-trained", "prompt-trained", "serving-differs"):
        assert f"{data}:2" in finding.places
    else:
        assert (finding.rows, finding.places) == (1, (f"{data}:2",))
    assert str(finding).endswith(f"[{name}]")


@pytest.mark.parametrize("name", FINDINGS)
def test_nothing_else_is_found_of_a_sound_row(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.template in (ALL_MARKED,):
        pytest.skip("under this template no row is sound")
    data = write(tmp_path / "rows.jsonl", sound_row(case))
    found = {each.id for each in audited(data, case, tmp_path).findings}
    assert found <= {"no-template", "no-markers"}


def test_prompts_alone_lack_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", CASES["no-answer"].bad, CASES["no-answer"].bad)
    found = audited(data, CASES["no-answer"], tmp_path)
    assert [each.id for each in found.findings] == ["no-markers"]
    assert str(found).endswith("tokens of prompts, which the model answers")
    assert found.to_json()["prompts"] == 2


def test_long_prompts_are_said_to_be_long(tmp_path: Path) -> None:
    case = replace(CASES["no-answer"], seq_len=64)
    long = [{"prompt": "a number " * length} for length in (100, 300)]
    data = write(tmp_path / "rows.jsonl", case.bad, *long, case.bad)
    found = audited(data, case, tmp_path)
    assert found.to_json()["prompts"] == 2, "those that are kept"
    (finding,) = found.of_level("warning")
    assert str(finding).startswith("2 rows: dropped: the prompt leaves no room for an answer")
    longest = max(opened(data, case, tmp_path).stats.lengths)
    assert f"; the longest row has {longest} tokens, --seq-len is 64; raise " in str(finding)
    with pytest.raises(DataError) as caught:
        audited(write(tmp_path / "rows.jsonl", *long), case, tmp_path)
    assert caught.value.found == (
        f"2 with no room for an answer; the longest row has {longest} tokens"
    )
    assert caught.value.expected == "a prompt of fewer than 64 tokens (--seq-len)"


def test_errors_stop_and_name_every_one(tmp_path: Path) -> None:
    case = replace(CASES["system-trained"], vocabulary=300)
    data = write(tmp_path / "rows.jsonl", chat("日本", "x", system="Be brief."))
    with pytest.raises(DataError, match="masks of the data are wrong") as caught:
        require_sound({"training": audited(data, case, tmp_path)})
    assert caught.value.code == "VOX-D050"
    ids = [fault.rpartition("[")[2] for fault in caught.value.faults]
    assert ids == ["outside-vocabulary]", "system-trained]"]
    assert f"{data}:1" in str(caught.value)


def test_warnings_do_not_stop(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", chat(*SOUND), CASES["cut-in-answer"].bad)
    found = audited(data, CASES["cut-in-answer"], tmp_path)
    require_sound({"training": found})
    stats = found.dataset.stats
    assert (stats.rows, stats.ended) == (2, 1)
    told = found.to_json()
    assert (told["rows_with_trained_end"], told["rows_without_trained_end"]) == (1, 1)
    assert 0 < told["trained_share"] < 1


@pytest.mark.parametrize("family", ["base", "base_with_bos"])
def test_a_space_before_an_answer_belongs_to_it(family: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "say ", "completion": "hello"},
        {"prompt": "say", "completion": " hello"},
        {"prompt": "say\n", "completion": "hello"},
        {"prompt": "say ", "completion": "+"},
        {"text": "say hello"},
    ]
    data = write(tmp_path / "rows.jsonl", *rows)
    dataset = opened(data, Case({}, family), tmp_path)
    assert dataset.stats.places["joined-answer"] == [[0, 1]]
    trained = [int((each.weights_T > 0).sum()) for each in dataset]
    assert trained[:2] == [1, 2], "of the first row the end alone"
    pair = {"prompt": "say ", "chosen": "hello", "rejected": "hello there"}
    pairs = opened(write(data, pair), Case({}, family), tmp_path, objective=ObjectiveSpec("dpo"))
    assert pairs.stats.counts["joined-answer"] == 1, "a row"


def test_a_template_may_end_in_a_space_that_takes_the_answers_first_token(tmp_path: Path) -> None:
    said = "{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    turns = f"{{% for m in messages %}}{said}{{% endfor %}}"
    ends = "{%% if add_generation_prompt %%}assistant:%s{%% endif %%}"
    first = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "hello"}]
    second = [first[0], {**first[1], "weight": 0}, first[0], {**first[1], "content": "7"}]
    data = write(tmp_path / "rows.jsonl", {"messages": first}, {"messages": second})
    for end, lost in (" ", [[0, 1]]), ("", None):
        dataset = opened(data, Case({}, "chatml", turns + ends % end), tmp_path)
        assert dataset.stats.places.get("joined-answer") == lost
        assert (dataset[0].weights_T > 0).sum() == (1 if lost else 2)


def test_what_the_assistant_quotes_is_no_prompt(tmp_path: Path) -> None:
    """The system prompt stands in the answer too, or only there: the template leaves it out."""
    template = GENERATION.replace("in messages %}", "in messages if message.role != 'system' %}")
    assert template != GENERATION
    for chosen in (None, template):
        case = Case(chat("how?", "Be brief."), "generation", chosen)
        data = write(tmp_path / "rows.jsonl", chat("how?", "Be brief.", system="Be brief."))
        assert not audited(data, case, tmp_path).of_level("error")


def test_counts_are_of_all_rows_and_the_first_few_are_named(tmp_path: Path) -> None:
    case = CASES["cut-in-answer"]
    data = write(tmp_path / "rows.jsonl", *([chat(*SOUND), case.bad] * 7))
    (finding,) = (each for each in audited(data, case, tmp_path).findings if each.rows)
    assert (finding.rows, len(finding.places)) == (7, 5)
    assert ", …)" in str(finding)


def test_the_cache_and_other_processes_tell_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES["serving-differs"], seq_len=48)
    rows = [chat(*SOUND), case.bad, chat("how?", "a number " * 400), {"text": "a <|im_end|> b"}]
    data = write(tmp_path / "rows.jsonl", *rows * 20)
    first = opened(data, case, tmp_path, block_bytes=999, workers=1).stats
    with monkeypatch.context() as guarded:
        guarded.setattr(dataset_cache, "make_part", None)
        assert opened(data, case, tmp_path).stats == first
    in_memory = build_dataset(load_records([data]), tokenizer(case.family, None), 48).stats
    sampled = {"served": 0, "counts": Counter(), "places": {}, "details": {}}
    assert replace(first, **sampled) == replace(in_memory, **sampled)
    seen = first.counts
    assert seen["rendered-text"] == in_memory.counts["rendered-text"] == 20
    stats = TypeAdapter(EncodeStats)
    assert stats.validate_json(stats.dump_json(first)) == first


def test_lengths_are_those_of_whole_rows(tmp_path: Path) -> None:
    rows = [chat(*SOUND), chat("how?", "a number " * 400), {"text": "a number " * 400}]
    data = write(tmp_path / "rows.jsonl", *rows)
    long, cut = (
        opened(data, replace(CASES["no-markers"], seq_len=n), tmp_path) for n in (9999, 32)
    )
    assert dict(long.stats.lengths) == dict(cut.stats.lengths)
    assert sorted(long.stats.lengths) == sorted({len(d) for d in long})


def test_the_vocabulary_is_the_models() -> None:
    assert vocabulary_of({"vocab_size": 7}) == 7
    assert vocabulary_of({"text_config": {"vocab_size": 7}}) == 7
    assert vocabulary_of({"vocab_size": "7"}) is None


def test_the_published_table_is_this_one() -> None:
    lines = PAGE.read_text().splitlines()
    published = [re.split(r" *\| *", line.strip("| ")) for line in lines if line.startswith("| `")]
    table = [[f"`{id}`", k.level, k.what, k.remedy] for id, k in FINDINGS.items()]
    assert [[*row[:3], row[4]] for row in published] == table
