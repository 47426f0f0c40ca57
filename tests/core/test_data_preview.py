"""Rows as they are shown: the same tokens and weights as are trained, and a page that is safe."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.core.data_samples import chat, completion, text
from tests.core.tiny_tokenizer import FAMILIES, tiny_tokenizer
from vox_core.contract import DataPolicy
from vox_core.data.audit.report import Finding
from vox_core.data.checked import CheckedFile, check_files
from vox_core.data.chosen import choose_rows
from vox_core.data.encode import Encoder
from vox_core.data.policy.mask import Mask
from vox_core.data.preview.choose import named, numbered, spread
from vox_core.data.preview.look import Looker, SeenRow
from vox_core.data.preview.page import is_page, page
from vox_core.data.records import Record
from vox_core.errors import DataError

RECORDS = {
    "chat": chat("how are you? 日本🙂", "I am well 🙂,\n\nthank you.", "and?", "nothing"),
    "completion": completion("the question", " a word"),
    "text": text("hello there 🙂 a number"),
}


def look(family: str, record: Record, seq_len: int = 999) -> SeenRow:
    return Looker(tiny_tokenizer(family), seq_len).look(record)


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("family", ["chatml", "llama3", "phi3", "base_with_bos", "generation"])
def test_what_is_shown_is_what_is_trained(family: str, kind: str) -> None:
    if kind == "chat" and FAMILIES[family].template is None:
        pytest.skip("a conversation needs a template")
    record = RECORDS[kind]
    encoder = Encoder(tiny_tokenizer(family), 999)
    (document,) = encoder.encode(record).documents
    seen = look(family, record)
    assert [*seen.ids] == document.tokens_T.tolist()
    assert [*seen.weights] == document.weights_T.tolist()
    assert seen.kept == len(seen.texts) == len(seen.ids)
    assert (seen.cut, seen.dropped, seen.fault, seen.starts) == ("none", None, None, ())
    rendered = encoder.renderer.render(record)
    whole = "".join(seen.texts)
    assert whole == rendered.text if rendered.templated else rendered.text in whole
    trained = "".join(t for t, w in zip(seen.texts, seen.weights, strict=True) if w)
    if kind == "chat":
        assert trained.startswith("I am well 🙂,\n\nthank you.")


def test_what_is_cut_away_is_shown_and_not_trained() -> None:
    whole = look("chatml", RECORDS["chat"])
    first_end = next(at for at in whole.special if whole.weights[at]) + 1
    turns = look("chatml", RECORDS["chat"], first_end + 3)
    assert (turns.cut, turns.kept, turns.ids) == ("whole turns", first_end, whole.ids)
    assert turns.weights[:first_end] == whole.weights[:first_end]
    assert not any(turns.weights[first_end:])
    inside = look("chatml", RECORDS["chat"], first_end - 2)
    assert (inside.cut, inside.kept) == ("mid-turn", first_end - 2)
    assert inside.findings == ("cut-in-answer",)
    before = look("chatml", RECORDS["chat"], 9)
    assert (before.dropped, before.kept) == ("nothing to train within seq_len", 9)
    assert before.findings == ("cut-before-answer",)
    assert before.ids == whole.ids and not before.trained


def test_a_long_text_is_shown_in_its_pieces() -> None:
    record = text("the answer is a number, " * 9)
    seen = look("chatml", record, 16)
    pieces = Encoder(tiny_tokenizer("chatml"), 16).encode(record).documents
    assert seen.cut == "split" and len(seen.starts) == len(pieces) - 1 > 2
    for start, piece in zip((0, *seen.starts), pieces, strict=True):
        after = [*seen.ids[max(0, start - 1) :]][: len(piece)]
        assert after == piece.tokens_T.tolist()


def test_a_row_that_the_template_refuses_says_why() -> None:
    seen = look("gemma_without_system", chat("a", "b", system="c"))
    assert seen.fault == "the chat template refuses the row: System role not supported"
    assert (seen.ids, seen.trained) == ((), 0)


def test_rows_are_spread_over_the_data() -> None:
    for rows, wanted in ((1000, 5), (7, 7), (3, 9), (0, 5)):
        chosen = spread(rows, wanted, seed=1)
        assert len(set(chosen)) == len(chosen) == min(rows, wanted)
        assert all(rows * n // wanted <= at for n, at in enumerate(chosen) if rows >= wanted)
        assert all(0 <= at < rows for at in chosen)
    assert spread(1000, 5, 1) == spread(1000, 5, 1) != spread(1000, 5, 2)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CheckedFile]:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    made = []
    for name in ("a.jsonl", "b.jsonl"):
        made.append(tmp_path / name)
        rows = (json.dumps({"text": f"{name} {n}"}) for n in range(4))
        made[-1].write_text("\n\n".join(rows))
    return check_files(made)


def test_rows_are_found_by_number(files: list[CheckedFile]) -> None:
    assert [record.text for record in numbered(files, [1, 3, 6])] == [
        "a.jsonl 1",
        "a.jsonl 3",
        "b.jsonl 2",
    ]


def test_rows_are_found_by_file_and_line(files: list[CheckedFile]) -> None:
    assert [r.text for r in named(files, ["b.jsonl:3", f"{files[0].path}:1"])] == [
        "b.jsonl 1",
        "a.jsonl 0",
    ]
    assert [r.text for r in named(files[:1], ["7"])] == ["a.jsonl 3"]
    for wrong in ("b.jsonl:2", "b.jsonl:99", "c.jsonl:1", "7", "b.jsonl"):
        with pytest.raises(DataError, match="not there") as caught:
            list(named(files, [wrong]))
        assert caught.value.code == "VOX-D051"


def test_rows_are_those_that_train_uses(tmp_path: Path, files: list[CheckedFile]) -> None:
    """Of any format, with the fields of vox.toml, and none that a policy leaves out."""
    table = tmp_path / "table.csv"
    table.write_text("question,answer\nhow?,so\nand?,because\n")
    fields = {"prompt": "question", "completion": "answer"}
    tables = choose_rows([table], [], DataPolicy(min_chars=7), fields=fields).train
    masked = [replace(files[0], chosen=Mask.of(np.array([3, 7]))), *tables]
    assert [record.line for record in numbered(masked, [0, 1, 2])] == [3, 7, 2]
    (first,) = named(masked, ["table.csv:1"])
    assert [message.content for message in first.messages or ()] == ["how?", "so"]


# --- the page -------------------------------------------------------------------------------------

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- &amp; \u202e\x1b[31m \ud800"
)


def made_page() -> str:
    seen = look("chatml", chat("how?", "so"))
    evil = SeenRow(Path(EVIL), 3, "chat", (EVIL,), (1,), (1.0,), kept=1)
    finding = Finding("no-end", "warning", EVIL, EVIL, rows=1, places=(EVIL,))
    return page(EVIL, {"model": EVIL}, [finding], [seen, evil])


def test_a_page_asks_for_nothing_and_runs_nothing_of_the_data() -> None:
    made = made_page()
    made.encode()  # halves of surrogates too
    assert EVIL not in made and "<img" not in made and "<!-- &amp;" not in made
    assert made.count("<script") == made.count("</script>") == 2
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", made)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', made)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    (style,) = re.findall(r"<style>(.*?)</style>", made, re.S)
    (script,) = re.findall(r"<script>(.*?)</script>", made, re.S)
    for kind, source in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "innerHTML" not in script and "eval" not in script


def test_a_page_has_all_of_the_rows() -> None:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', made_page())
    found = json.loads(data)
    seen = look("chatml", chat("how?", "so"))
    assert found["files"] == ["train.jsonl", EVIL]
    assert found["rows"][0] == {**seen.to_json(), "file": 0}
    assert found["rows"][1]["tokens"] == [EVIL]


def test_a_page_is_known_from_other_files(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page("x", {}, [], []))
    assert is_page(path)
    path.write_text("<!doctype html><p>mine")
    assert not is_page(path)
