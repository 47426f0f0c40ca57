"""`vox data check`: what it says, where it takes its files from, and how it ends."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vox_core.api.rows import RowFault
from vox_core.contract import RowStream
from vox_data.check import FaultCounts

LOADING = "loading the tokenizer …\n"
GOOD = '{"prompt": "a", "completion": "b", "id": 1}\n'


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))


def test_forms_rows_and_unused_fields_of_each_file(vox) -> None:
    Path("train.jsonl").write_text(GOOD * 2 + '{"instruction": "a", "output": "b"}\n')
    Path("valid.csv").write_text("text\na\n")
    done = vox("data", "check", ".")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "train.jsonl: 2 prompt/completion, 1 Alpaca",
        "  not used: id (2)",
        "valid.csv (valid): 1 text",
        "no problems found",
        "next: vox train .",
    ]


def test_a_file_that_may_not_be_read_is_a_fault_of_the_data(vox, monkeypatch) -> None:
    opened = Path.open

    def denied(path: Path, *given: object, **more: object) -> object:
        if path.name == "rows.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *given, **more)

    Path("rows.jsonl").write_text(GOOD)
    monkeypatch.setattr(Path, "open", denied)
    done = vox("data", "check", "rows.jsonl")
    assert (done.code, done.err.partition("\n")[0]) == (
        2,
        "error[VOX-D001]: a data file cannot be read",
    )


def test_the_next_command_has_the_same_files_and_flags(vox) -> None:
    Path("my rows.csv").write_text("q,a\nhow?,so\n")
    flags = ("--field", "prompt=q", "--field", "completion=a", "--seq-len", "64")
    said = vox("data", "check", "my rows.csv", *flags).out.splitlines()
    assert said[1:] == [
        "no problems found",
        "next: vox train 'my rows.csv' --field prompt=q --field completion=a --seq-len 64",
    ]


def test_a_header_of_which_no_row_can_be_made_is_one_fault(vox) -> None:
    Path("rows.csv").write_text("q,a\n" + "how?,so\n" * 50)
    done = vox("data", "check", "rows.csv")
    lines = done.out.splitlines()
    assert done.code == 2 and "1 error, by kind:" in lines
    assert [line for line in lines if "rows.csv: found the fields q, a in the header" in line]
    assert lines[-1].startswith("next: correct these files")
    assert "--field prompt=NAME --field completion=OTHER" in lines[-1]
    done = vox("train", "rows.csv")
    assert (done.code, done.err.count("\n  - ")) == (2, 1)


def test_pairs_of_answers_are_said_not_to_be_trained(vox, tmp_path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "how?", "chosen": "so", "rejected": "no"}')
    done = vox("data", "check", path)
    told = f"{path}: 1 preference (checked, and not trained)\nno problems found\n"
    assert (done.code, done.out) == (0, f"{told}next: vox train {path} --objective dpo\n")


def test_rows_are_tried_with_the_objective_and_its_fields_count_as_used(vox) -> None:
    pair = '{"prompt": "how?", "chosen": "so", "rejected": "no"}\n'
    Path("pairs.jsonl").write_text(pair)
    done = vox("data", "check", "pairs.jsonl", "--objective", "dpo", "-O", "beta=0.2")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "pairs.jsonl: 1 preference",
        "no problems found",
        "next: vox train pairs.jsonl --objective dpo --objective-option beta=0.2",
    ]
    Path("judged.jsonl").write_text(GOOD.replace('"id": 1', '"label": true') + GOOD)
    done = vox("data", "check", "judged.jsonl", "--objective", "kto")
    lines = done.out.splitlines()
    assert done.code == 2
    assert lines[0] == "judged.jsonl: 2 prompt/completion; 1 row with errors"
    assert "        1  --objective kto" in lines
    assert any(line.startswith("- judged.jsonl, line 2: found no label") for line in lines)
    assert lines[-1].startswith("next: correct these rows")


JUDGED = '{"prompt": "a", "completion": "b", "label": %s}\n'
CHOSEN = '{"prompt": "how?", "chosen": "so", "rejected": "no"}\n'


@pytest.mark.parametrize(
    ("rows", "given", "more"),
    [
        (CHOSEN, (), ("--objective", "dpo")),
        (CHOSEN, ("--objective", "sft"), ("--objective", "dpo")),
        (CHOSEN + GOOD, (), ()),
        (JUDGED % "true" + JUDGED % "false", (), ("--objective", "kto")),
        (JUDGED % "1" + JUDGED % "0", (), ("--objective", "kto")),
        (JUDGED % "true" + GOOD, (), ()),
        (JUDGED % '"good"', (), ()),
        (JUDGED % "true", ("--objective", "sft"), ("--objective", "sft")),
        (GOOD, ("--objective", "grpo"), ("--objective", "grpo", "--reward", "exact")),
        (GOOD, ("--objective", "ppo"), ("--objective", "ppo", "--reward", "exact")),
    ],
)
def test_the_next_command_is_one_that_trains_the_rows(vox, rows, given, more) -> None:
    """What it refuses comes before the model, which is missing."""
    Path("rows.jsonl").write_text(rows)
    command = ("train", "rows.jsonl", *more)
    condition = "if the labels judge the answers, " if "kto" in more else ""
    assert vox("data", "check", "rows.jsonl", *given).out.endswith(
        f"next: {condition}vox {' '.join(command)}\n"
    )
    assert "no-such-model" in (refused := vox(*command, "--model", "no-such-model").err)
    assert "error[VOX-M" in refused, refused


def test_a_teacher_or_a_reward_that_has_to_be_chosen_is_said(vox) -> None:
    asked = '{"messages": [{"role": "user", "content": "how?"}]}\n'
    Path("asked.jsonl").write_text(asked)
    Path("rows.jsonl").write_text(asked)
    assert vox("data", "check", "rows.jsonl", "--objective", "grpo").out.endswith(
        "1 prompt\nno problems found\nnext: write a reward, then "
        "vox train rows.jsonl --objective grpo --reward FILE.py:FUNCTION\n"
    )
    Path("rows.jsonl").write_text(GOOD)
    done = vox("data", "check", "rows.jsonl", "--objective", "distill")
    assert done.out.endswith(
        "next: choose a teacher with the same tokenizer, then "
        "vox train rows.jsonl --objective distill --teacher MODEL\n"
    )
    for reward, found in (("numeric", 2), ("f.py:reward", 0)):
        done = vox("data", "check", "asked.jsonl", "--objective", "grpo", "--reward", reward)
        assert done.code == found, done.out
    assert done.out.endswith("next: vox train asked.jsonl --objective grpo --reward f.py:reward\n")
    Path("vox.toml").write_text('[train]\nobjective = "grpo"\nreward = "f.py:reward"\n')
    assert vox("data", "check", "rows.jsonl").out.endswith("next: vox train rows.jsonl\n")


def test_the_file_of_a_reward_is_loaded_once_it_is_written(vox) -> None:
    Path("rows.jsonl").write_text(GOOD)
    command = ("data", "check", "rows.jsonl", "--objective", "grpo", "--reward", "f.py:reward=0.5")
    assert vox(*command).code == 0
    Path("f.py").write_text("def rewards(row, answer):\n    return 1\n")
    done = vox(*command)
    assert (done.code, done.out) == (2, "rows.jsonl: 1 prompt/completion\n")
    assert "error[VOX-C004]" in done.err
    assert "f.py:reward" in done.err
    Path("f.py").write_text("def reward(row, answer):\n    return 1\n")
    assert vox(*command).code == 0


def test_the_file_of_a_reward_in_vox_toml_is_not_run(vox) -> None:
    Path("rows.jsonl").write_text(GOOD)
    Path("f.py").write_text("open('ran', 'w')\ndef reward(row, answer):\n    return 1\n")
    Path("vox.toml").write_text('[train]\nobjective = "grpo"\nreward = ["f.py:reward"]\n')
    assert vox("data", "check", "rows.jsonl").code == 0
    assert not Path("ran").exists()
    assert vox("data", "check", "rows.jsonl", "--reward", "f.py:reward").code == 0
    assert Path("ran").exists()


def test_tasks_of_reasoning_gym_have_a_reward_of_their_own(
    vox, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = RowStream([{"prompt": "how?", "completion": "so", "gym": {}}], "legs")
    monkeypatch.setattr("vox_objectives.gym.open_task", lambda _: rows)
    done = vox("data", "check", "gym:leg_counting?size=2", "--objective", "grpo")
    assert done.out.endswith("'gym:leg_counting?size=2' --objective grpo --reward gym\n")


def test_a_fault_of_every_row_is_listed_once(vox) -> None:
    Path("prompts.csv").write_text("prompt\na\nb\nc\n")
    Path("mixed.csv").write_text("prompt,completion\na,\nb,\nc,d\n")
    done = vox("data", "check", "prompts.csv", "mixed.csv")
    lines = done.out.splitlines()
    at = lines.index("5 errors, by kind:")
    fault = "none of completion, response, output, answer, expected one"
    assert lines[at + 1 :][:6] == [
        "        5  unknown form",
        "",
        "the first 3:",
        f"- prompts.csv: found in every row {fault}",
        f"- mixed.csv, row 1: found {fault}",
        f"- mixed.csv, row 2: found {fault}",
    ]
    assert "prompts alone: --objective grpo --reward FILE.py:FUNCTION" in lines[-1]
    assert "--malformed-rows skip" in lines[-1]
    done = vox("data", "check", "prompts.csv")
    assert "next: correct these files or leave them out" in done.out
    assert "--malformed-rows" not in done.out, "no row could be kept"


def test_a_fault_of_every_row_hides_no_other(vox) -> None:
    others = [{}, {"rating": "x"}, {"tags": "q"}]
    rows = [{"prompt": "a", "completion": 1, **other} for other in others]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = vox("data", "check", "rows.jsonl")
    assert "5 errors, by kind:" in done.out and "in every row" not in done.out
    for field in ("completion", "rating", "tags"):
        assert f'as "{field}"' in done.out


def test_faults_by_kind_and_the_first_of_them_whole(vox) -> None:
    rows = GOOD + '{"text": ""}\n' * 3 + '{"messages": [{"role": "x"}]}\n' * 2 + "{\n" * 30
    Path("bad.jsonl").write_text(rows)
    done = vox("data", "check", "bad.jsonl")
    assert (done.code, done.err) == (2, "")
    lines = done.out.splitlines()
    assert lines[0] == "bad.jsonl: 1 prompt/completion; 35 rows with errors"
    assert lines[3:6] == [
        "35 errors, by kind:",
        "       30  invalid JSON",
        '        3  empty in "text"',
    ]
    assert lines[6] == "        2  roles in messages[…].role"
    assert lines[8:10] == [
        "the first 10:",
        '- bad.jsonl, line 2: found nothing in "text", expected text',
    ]
    assert len(lines) == 9 + 5 + 3 + 2 + 1
    assert lines[-1].startswith("next: correct these lines, or leave them out with --malformed")
    report = json.loads(vox("data", "check", "bad.jsonl", "--json").out)
    assert (report["rows"], report["faults"], len(report["first"])) == (1, 35, 10)
    assert list(report["kinds"].values()) == [30, 3, 2]
    assert report["files"][0]["forms"] == {"prompt/completion": 1}


def test_settings_are_those_of_train(vox) -> None:
    Path("rows.csv").write_text("q,a,text\nx,y,z\n")
    Path("vox.toml").write_text(
        '[data.fields]\nprompt = "q"\ncompletion = "a"\ntext = ""\n\n[train]\ndata = "rows.csv"\n'
    )
    found = "rows.csv: 1 prompt/completion\nno problems found\nnext: vox train\n"
    assert vox("data", "check").out == found
    shown = vox("config", "show").out
    assert 'fields = { "prompt" = "q", "completion" = "a", "text" = "" }  # vox.toml' in shown
    Path("again.toml").write_text(shown)
    assert vox("data", "check", "--config", "again.toml").code == 0
    assert json.loads(vox("config", "show", "--json").out)["data"]["fields"]["text"] == ""


def test_a_field_that_no_row_has_is_an_error(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("vox.toml").write_text('[data.fields]\npromt = "q"\n')
    done = vox("data", "check", "a.jsonl")
    assert done.code == 2 and "promt is no field of a row; did you mean prompt?" in done.err
    Path("vox.toml").unlink()
    turned = vox("data", "check", "a.jsonl", "--field", "q=prompt")
    assert turned.code == 2 and "did you mean prompt=q?" in turned.err
    other = vox("data", "check", "a.jsonl", "--field", "question=q")
    assert other.code == 2 and "did you mean prompt?" in other.err
    monkeypatch.setenv("VOX_DATA_FIELDS", "prompt=q")
    done = vox("data", "check", "a.jsonl")
    assert done.code == 2 and "VOX_DATA_FIELDS is unknown" in done.err


def test_no_data_and_no_rows(vox) -> None:
    done = vox("data", "check")
    assert done.code == 2 and "VOX-C004" in done.err
    Path("empty.csv").write_text("text\n")
    done = vox("data", "check", "empty.csv")
    assert done.code == 2 and "- empty.csv has no rows" in done.out


def made_model(family: str, monkeypatch: pytest.MonkeyPatch, vocabulary: int = 400) -> None:
    """`model`: a tokenizer and a config.json."""
    from tests.core.tiny_tokenizer import tiny_tokenizer

    tiny_tokenizer(family).save_pretrained("model")
    config = {"model_type": "llama", "vocab_size": vocabulary}
    Path("model/config.json").write_text(json.dumps(config))
    monkeypatch.setattr("vox_core.models.resolve", lambda name, **_: Folder(Path(name)))


def test_the_chat_template_of_a_model_is_tried(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    made_model("gemma_without_system", monkeypatch)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    answer = {"role": "assistant", "content": "a"}
    rows = [{"messages": [*turns, answer]}, {"messages": [*turns[1:], answer]}]
    Path("rows.json").write_text(json.dumps(rows))
    assert vox("data", "check", "rows.json").code == 0
    done = vox("data", "check", "rows.json", "--model", "model")
    assert done.code == 2
    assert "rows.json: 2 messages; 1 row with errors" in done.out
    assert "- rows.json, row 1: " in done.out and "System role not supported" in done.out
    assert done.out.endswith(
        "next: change these rows to what the template takes, or choose another model\n"
    )


def test_without_a_template_one_is_proposed(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    made_model("base", monkeypatch)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    Path("rows.json").write_text(json.dumps([{"messages": turns}] * 3))
    done = vox("data", "check", "rows.json", "--model", "model")
    assert (done.code, done.out.splitlines()[-1]) == (
        2,
        "next: name one with --template chatml, or use an -instruct model",
    )


def test_rows_from_stdin_have_no_path(vox) -> None:
    done = vox("data", "check", "-", stdin='{"prompt": "a"}\n{"prompt": "b"}\n')
    assert done.out.startswith("the given rows: no rows; 2 rows with errors\n")
    assert "- the given rows: found in every row none of completion, response" in done.out


AUDITED = ("data", "check", "rows.csv", "--model", "model")


def test_warnings_of_the_audit_are_shown(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    made_model("chatml", monkeypatch)
    Path("rows.csv").write_text("text,rating\na number,5\na <|im_end|> b,5\n<|im_end|>,1\n")
    done = vox(*AUDITED, "--min-rating", 3)
    assert (done.code, done.err) == (0, LOADING)
    lines = done.out.splitlines()
    assert lines[2].startswith("masks of the training rows: ")
    assert lines[3].startswith("- warning: 1 row: ") and "(rows.csv:2); " in lines[3]
    assert lines[3].endswith("[rendered-text]")
    assert lines[4:] == [
        "no problems found",
        "next: vox train rows.csv --min-rating 3 --model model",
    ]
    found = json.loads(vox(*AUDITED, "--min-rating", 3, "--json").out)
    assert (found["faults"], found["error"]) == (0, None)
    ids = [each["id"] for each in found["audit"]["training"]["findings"]]
    assert ids == ["rendered-text", "no-markers"]
    assert "validation" not in found["audit"]


def test_errors_of_the_audit_are_faults(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    made_model("chatml", monkeypatch, vocabulary=300)
    Path("rows.csv").write_text("prompt,completion\nhow?,so\n")
    Path("held.jsonl").write_text('{"prompt": "how?", "completion": "so"}\n')
    done = vox(*AUDITED, "--valid", "held.jsonl")
    assert (done.code, done.err) == (2, LOADING)
    assert "- error: 1 row: a token that the model has no embedding for (rows.csv:1); " in done.out
    assert "masks of the validation rows: " in done.out and "(held.jsonl:1); " in done.out
    assert vox("data", "check", "rows.csv").code == 0
    Path("rows.csv").write_text("prompt,completion\nhow?,so\nhow?,\n")
    faulty = vox(*AUDITED)
    assert faulty.code == 2 and "masks" not in faulty.out


def test_what_train_would_refuse_besides_is_told(vox, monkeypatch: pytest.MonkeyPatch) -> None:
    made_model("chatml", monkeypatch)
    Path("rows.csv").write_text("text,rating\na number,1\n")
    done = vox(*AUDITED, "--min-rating", 3)
    assert done.code == 2 and "rows.csv: 1 text" in done.out and "error[VOX-D023]" in done.err
    assert json.loads(vox(*AUDITED, "--min-rating", 3, "--json").out)["error"]["code"] == "VOX-D023"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = self.tokenizer = path


def test_without_a_model_transformers_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(GOOD)
    script = (
        "import sys; from vox_core.cli import failures, root; "
        f"code = failures.run(root, ['data', 'check', {str(tmp_path / 'rows.jsonl')!r}]); "
        "print(code, {'transformers', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_faults_are_counted_by_code_and_location_without_indices() -> None:
    faults = FaultCounts()
    for number in range(30):
        at = ("messages", number, "role")
        faults.add(f"a.jsonl, line {number}", RowFault("roles", at, f'"{number}"', "a role"))
    faults.add("a.jsonl, line 31", RowFault("roles", (), "nobody", "somebody"))
    assert faults.kinds == {"roles in messages[…].role": 30, "roles": 1}
    assert (faults.total, len(faults.first), faults.codes) == (31, 6, {"roles"})
    assert faults.first[0] == 'a.jsonl, line 0: found "0" as messages[0].role, expected a role'
