"""Rows as they are shown: the same tokens and weights as are trained, and a page that is safe."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest
from tests.core.data_samples import chat, completion, encode_one, text
from tests.core.tiny_tokenizer import FAMILIES, tiny_tokenizer

from vox_core.contract import DataPolicy
from vox_core.data.audit import Finding
from vox_core.data.checked import CheckedFile, check_files
from vox_core.data.chosen import choose_rows
from vox_core.data.encode import Encoder
from vox_core.data.rows import Record
from vox_core.errors import DataError
from vox_data.page import is_page, page
from vox_data.preview import named, numbered, spread
from vox_data.token_view import TokenView, TokenViewer

RECORDS = {
    "chat": chat("how are you? 日本🙂", "I am well 🙂,\n\nthank you.", "and?", "nothing"),
    "completion": completion("the question", " a word"),
    "text": text("hello there 🙂 a number"),
}


def look(family: str, record: Record, seq_len: int = 999) -> TokenView:
    return TokenViewer(tiny_tokenizer(family), seq_len).view(record)


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("family", ["chatml", "llama3", "phi3", "base_with_bos", "generation"])
def test_what_is_shown_is_what_is_trained(family: str, kind: str) -> None:
    if kind == "chat" and FAMILIES[family].template is None:
        pytest.skip("a conversation needs a template")
    record = RECORDS[kind]
    encoder = Encoder(tiny_tokenizer(family), 999)
    (document,) = encode_one(encoder, record).documents
    seen = look(family, record)
    assert [*seen.ids] == document.tokens_T.tolist()
    assert [*seen.weights] == document.weights_T.tolist()
    assert seen.kept == len(seen.tokens) == len(seen.ids)
    assert (seen.cut, seen.dropped, seen.fault, seen.starts) == ("none", None, None, ())
    rendered = encoder.renderer.render(record)
    whole = "".join(seen.tokens)
    assert whole == rendered.text if rendered.templated else rendered.text in whole
    trained = "".join(t for t, w in zip(seen.tokens, seen.weights, strict=True) if w)
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
    assert (before.dropped, before.kept) == ("no room for an answer", 9)
    assert before.findings == ("prompt-too-long",)
    assert before.ids == whole.ids and not before.trained


def test_a_long_text_is_shown_in_its_pieces() -> None:
    record = text("the answer is a number, " * 9)
    seen = look("chatml", record, 16)
    pieces = encode_one(Encoder(tiny_tokenizer("chatml"), 16), record).documents
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


def test_a_row_of_an_objective_is_shown_as_its_documents(files: list[CheckedFile]) -> None:
    def examples(row, _other):
        return {side: {"text": f"{side} {row['text']}"} for side in ("good", "bad")}

    expected = ["good b.jsonl 0", "bad b.jsonl 0"]
    assert [record.text for record in numbered(files, [4], examples)] == expected
    assert [record.text for record in named(files, ["b.jsonl:1"], examples)] == expected


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
        assert caught.value.found is None


def test_rows_of_any_format_stand_where_their_file_has_them(
    files: list[CheckedFile], tmp_path: Path
) -> None:
    table, packed, array = (tmp_path / name for name in ("t.csv", "p.jsonl.gz", "a.json"))
    table.write_text("q,a\n" + "".join(f"how {n}?,so {n}\n" for n in range(5)))
    rows = [{"q": f"why {n}?", "a": "so"} for n in range(5)]
    packed.write_bytes(gzip.compress("\n\n".join(map(json.dumps, rows)).encode()))
    array.write_text(json.dumps(rows))
    made = check_files([table, packed, array], {"prompt": "q", "completion": "a"})
    shown = [*numbered(made, [1, 7, 13]), *named(made, ["t.csv:5", "p.jsonl.gz:1", f"{array}:2"])]
    assert [(r.source, r.line, (r.messages or ())[0].content) for r in shown] == [
        (table, 2, "how 1?"),
        (packed, 5, "why 2?"),
        (array, 4, "why 3?"),
        (table, 5, "how 4?"),
        (packed, 1, "why 0?"),
        (array, 2, "why 1?"),
    ]


def test_only_rows_that_are_used_are_shown(files: list[CheckedFile], tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    lines = [json.dumps({"text": "a" * n, "rating": n % 2}) for n in range(1, 41)]
    path.write_text("\n".join(["{", *lines]))
    policy = DataPolicy(malformed_rows="skip", max_skipped=0.5, min_rating=1, valid_share=0.3)
    chosen = choose_rows([path], [], policy)
    both = [*chosen.train, *chosen.valid]
    assert [each.path for each in both] == [path, path]
    shown = list(numbered(both, range(sum(file.used for file in both))))
    assert sorted(r.line for r in shown) == [*range(2, 42, 2)]
    assert [len(r.text or "") for r in named(both, ["c.jsonl:2", "c.jsonl:40"])] == [1, 39]
    for line in (1, 3):
        with pytest.raises(DataError, match="not there") as caught:
            list(named(both, ["c.jsonl:2", f"c.jsonl:{line}"]))
        assert caught.value.found == "left out by the policy of the data"
    with pytest.raises(DataError) as caught:
        list(named(both, ["c.jsonl:99"]))
    assert caught.value.found is None


def test_a_file_that_changed_meanwhile_is_told(files: list[CheckedFile]) -> None:
    files[0].path.write_text('{"text": ""}')
    with pytest.raises(DataError, match="changed while it was read"):
        list(numbered(files, [0]))


# --- the page -------------------------------------------------------------------------------------

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- &amp; \u202e\x1b[31m \ud800"
)


def made_page() -> str:
    seen = look("chatml", chat("how?", "so"))
    evil = TokenView(Path(EVIL), 3, "chat", (EVIL,), (1,), (1.0,), kept=1)
    finding = Finding("no-end", rows=1, places=(EVIL,), detail=EVIL)
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
    assert found["rows"][0] == json.loads(json.dumps({**seen.to_json(), "file": 0}))
    assert found["rows"][1]["tokens"] == [EVIL]


def test_a_page_is_known_from_other_files(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page("x", {}, [], []))
    assert is_page(path)
    path.write_text("<!doctype html><p>mine")
    assert not is_page(path)
