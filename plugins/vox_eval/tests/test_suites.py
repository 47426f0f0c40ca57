"""Suites and their rows: what is read, and every fault with its place, before any work."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vox_core.errors import VoxError
from vox_eval.scorecard import units
from vox_eval.suites import read_suites

ROW = {"prompt": "2 + 2?", "ideal": "4"}
CHOICES = {"prompt": "2 + 2?", "choices": ["3", "4"], "ideal": 1}


@pytest.fixture
def read(write):
    """`read(row, ..., scorer=, tasks=)` -> the suite with one task of these rows."""

    def made(*rows: object, scorer: str = '"exact"', more: str = "", limit: int = 0):
        write("rows.jsonl", *rows)
        text = f'name = "s"\n[[task]]\nid = "t"\nrows = "rows.jsonl"\nscorer = {scorer}\n{more}'
        return read_suites([write("suite.toml", text)], limit)

    return made


def faults(caught) -> str:
    return "\n".join(caught.value.faults)


# --- what is read ---------------------------------------------------------------------------------


def test_a_suite(suite) -> None:
    found = read_suites([suite])
    say, warm, pick, text = found.tasks
    assert found.name == "tiny"
    assert [each.id for each in found.tasks] == ["say", "warm", "pick", "text"]
    assert (say.table.weight, say.settings().max_tokens, say.settings().temperature) == (3, 5, 0)
    assert (warm.settings().temperature, warm.settings().seed) == (1, 7)
    assert say.examples[0].messages == [{"role": "user", "content": "Say 0."}]
    assert say.examples[0].ideal == ("0", "A", "B")
    assert [each.ideal for each in pick.examples] == [("one",), ("twenty",), ("one",)]
    assert text.examples[0].text == "Hello."


@pytest.mark.parametrize(
    ("row", "ideal"),
    [
        ({"prompt": "a", "ideal": 4}, ("4",)),
        ({"prompt": "a", "ideal": [4, 0.5, "x"]}, ("4", "0.5", "x")),
        ({"prompt": "a", "completion": "x"}, ("x",)),
        ({"messages": [{"role": "user", "content": "a"}], "ideal": "x", "more": 1}, ("x",)),
    ],
)
def test_right_answers(read, row, ideal) -> None:
    assert read(row).tasks[0].examples[0].ideal == ideal


def test_the_digest_is_of_what_decides_scores(read) -> None:
    same = read(ROW).digest
    assert read({"ideal": "4", "prompt": "2 + 2?"}).digest == same
    others = [
        read({**ROW, "ideal": "5"}),
        read(ROW, ROW),
        read(ROW, scorer='"contains"'),
        read(ROW, scorer='{ name = "exact", ignore-case = true }'),
        read(ROW, more="sampling = { seed = 1 }"),
        read(ROW, more="weight = 2"),
    ]
    assert same not in {other.digest for other in others}
    assert read(ROW, {**ROW, "ideal": "5"}, limit=1).digest == same


def test_rows_of_any_format_that_vox_reads(write, tmp_path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode()))
    write("rows.csv", "prompt,completion", "2 + 2?,4")
    write("rows.json", json.dumps([ROW]))
    for name in ("rows.jsonl.gz", "rows.csv", "rows.json"):
        text = f'name = "s"\ntask = [{{ id = "t", rows = "{name}", scorer = "exact" }}]'
        (task,) = read_suites([write("suite.toml", text)]).tasks
        assert [each.ideal for each in task.examples] == [("4",)], name


def test_several_suites(write) -> None:
    write("rows.jsonl", ROW)
    task = 'task = [{ id = "t", rows = "rows.jsonl", scorer = "exact" }]'
    paths = [write(f"{name}.toml", f'name = "{name}"\n{task}') for name in ("a", "b")]
    found = read_suites(paths)
    assert (found.name, [task.id for task in found.tasks]) == ("a+b", ["a/t", "b/t"])
    with pytest.raises(VoxError) as caught:
        read_suites([paths[0], paths[0]])
    assert "two suites are called 'a'" in faults(caught)


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("name = ", "it cannot be read: Invalid value"),
        ('name = "s"', "[[task]] is missing"),
        ('name = "s"\ntask = []', "task = []: tuple should have at least 1 item"),
        ('name = "a b"\ntask = []', "name = 'a b': string should match"),
        ('name = "s"\n[[task]]\nid = "t"', "[[task]] 1: rows is missing"),
        ('name = "s"\n[[task]]\nid = "t"\nscore = 1', "score is unknown; did you mean scorer?"),
        ("[[task]]\nsampling = { max-tokens = 0 }", "max-tokens = 0: input should be greater"),
        (
            "[[task]]\nsampling = { max-token = 9 }",
            "[[task]] 1 [sampling]: max-token is unknown; did you mean max",
        ),
        ("[[task]]\nweight = -1", "weight = -1: input should be greater"),
        ("[[task]]\nscorer = { tolerance = 1 }", "name is missing"),
    ],
)
def test_a_malformed_suite(write, text, fault) -> None:
    with pytest.raises(VoxError) as caught:
        read_suites([write("suite.toml", text)])
    assert (caught.value.code, caught.value.exit_code) == ("VOX-C010", 2)
    assert fault in faults(caught)


def test_a_list_of_faulty_tables_is_not_called_empty(write) -> None:
    with pytest.raises(VoxError) as caught:
        read_suites(
            [write("suite.toml", "[[task]]\nid = 't'\nrows = 'r'\nscorer = 'exact'\ntop-p = 1")]
        )
    assert caught.value.faults == ("name is missing", "[[task]] 1: top-p is unknown")


def test_every_fault_of_the_scorers_together(read) -> None:
    more = '[[task]]\nid = "u"\nrows = "none"\nscorer = { name = "numeric", tolerence = 1 }'
    with pytest.raises(VoxError) as caught:
        read(ROW, scorer='"exakt"', more=more)
    assert caught.value.faults == (
        "task 't': there is no scorer 'exakt'; did you mean exact?",
        "task 'u': scorer 'numeric': tolerence: unknown option",
    )


def test_two_tasks_of_one_id(read) -> None:
    with pytest.raises(VoxError, match="suite is invalid") as caught:
        read(ROW, more='[[task]]\nid = "t"\nrows = "rows.jsonl"\nscorer = "exact"')
    assert faults(caught) == "two tasks have the id 't'"


def test_two_tasks_of_one_id_in_a_suite_of_a_package(monkeypatch) -> None:
    """As `reasoning-gym:chain_sum,chain_sum?seed=1` has them."""
    table = {"id": "t", "scorer": "exact", "rows": [ROW]}
    made = SimpleNamespace(name="made", load=lambda: lambda part, model: [table, table])
    monkeypatch.setattr("vox_eval.suites.entry_points", lambda group: [made])
    with pytest.raises(VoxError, match="suite is invalid") as caught:
        read_suites([Path("made:t,t")])
    assert faults(caught) == "two tasks have the id 't'"


def test_a_suite_of_a_package_that_raises_is_named(monkeypatch) -> None:
    made = SimpleNamespace(name="made", load=lambda: lambda part, model: int(part))
    monkeypatch.setattr("vox_eval.suites.entry_points", lambda group: [made])
    with pytest.raises(VoxError, match="suite 'made' failed in its suite") as caught:
        read_suites([Path("made:t")])
    assert "ValueError" in str(caught.value.found)


def test_an_empty_source_is_none(read) -> None:
    (task,) = read({**ROW, "source": ""}, {**ROW, "source": ""}, {**ROW, "source": "a"}).tasks
    assert units(task) == 3


def test_no_suite(tmp_path) -> None:
    with pytest.raises(VoxError) as caught:
        read_suites([])
    assert caught.value.code == "VOX-C004"
    with pytest.raises(VoxError) as caught:
        read_suites([tmp_path / "none.toml"])
    assert (caught.value.code, faults(caught)[:17]) == ("VOX-C010", "it cannot be read")


@pytest.mark.parametrize(
    ("row", "scorer", "fault"),
    [
        ("{", "exact", "invalid JSON"),
        ({"ideal": "4"}, "exact", "found the fields ideal"),
        ({"prompt": "a", "messages": [], "ideal": "4"}, "exact", 'found "prompt" and "messages"'),
        ({"prompt": "a"}, "exact", 'found no "ideal"'),
        ({"prompt": "a", "ideal": [None]}, "exact", 'found null as "ideal"'),
        ({"prompt": "a", "ideal": True}, "exact", 'found a boolean as "ideal"'),
        ({"prompt": "a", "ideal": "two"}, "numeric", "found no number: 'two'"),
        ({"prompt": "a", "ideal": "("}, "regex", "found no regular expression"),
        (ROW, "choice", 'found the fields prompt, ideal, expected also "choices"'),
        ({**CHOICES, "choices": ["4"]}, "choice", 'found 1 as "choices"'),
        ({**CHOICES, "choices": "4"}, "choice", 'found a string as "choices"'),
        ({**CHOICES, "choices": ["4", "4"]}, "choice", "found a text twice"),
        ({**CHOICES, "choices": ["4", " "]}, "choice", "found nothing in choices[1]"),
        ({**CHOICES, "ideal": 2}, "choice", "its index from 0 to 1"),
        ({**CHOICES, "ideal": True}, "choice", "its index from 0 to 1"),
        ({**CHOICES, "ideal": "5"}, "choice", "found '5'"),
        (ROW, "perplexity", 'expected also "text"'),
        ({"text": " "}, "perplexity", 'found nothing in "text"'),
    ],
)
def test_a_malformed_row(read, tmp_path, row, scorer, fault) -> None:
    good = {**CHOICES, "text": "a", "schema": {}} | ({"ideal": "4"} if scorer != "choice" else {})
    with pytest.raises(VoxError) as caught:
        read(good, row, scorer=f'"{scorer}"')
    assert (caught.value.code, len(caught.value.faults)) == ("VOX-D003", 1)
    assert faults(caught).startswith(f"{tmp_path / 'rows.jsonl'}, line 2: found ")
    assert fault in faults(caught)


def test_rows_that_are_not_there(read, tmp_path) -> None:
    with pytest.raises(VoxError, match="task 't' has no rows") as caught:
        read()
    assert caught.value.code == "VOX-D002"
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(VoxError) as caught:
        read_suites([tmp_path / "suite.toml"])
    assert (caught.value.code, caught.value.where) == ("VOX-D001", str(tmp_path / "rows.jsonl"))
