"""`vox promote` and `vox registry` on tiny Llamas: records, names, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vox_core.api.runs import RunFolder, locked
from vox_core.errors import ModelError
from vox_eval import cli, registry

GATE = """
suites = ["yes.toml"]
dtype = "fp32"
backends = ["cpu"]
[[require]]
task = "yes"
superior = 0.2
"""
SUITE = """
name = "yes"
[[task]]
id = "yes"
rows = "yes.jsonl"
scorer = "choice"
[[task]]
id = "say"
rows = "yes.jsonl"
scorer = "contains"
sampling = { max-tokens = 2 }
"""


@pytest.fixture
def gate(write, trained: Path, tmp_path: Path) -> Path:
    shutil.copy(trained.parent / "yes.jsonl", tmp_path)
    write("yes.toml", SUITE)
    return write("gate.toml", GATE)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "mine"))


def records_of(out: str) -> Path:
    """The folder that a yes has printed."""
    found = re.search(r"^records  (.*)$", out, re.MULTILINE)
    assert found, out
    return Path(found[1])


def digest_of(path: Path) -> str:
    return json.loads(path.read_text())["current"]["digest"]


def test_a_yes_moves_the_name_that_commands_take(vox, gate, run, llama) -> None:
    done = vox("promote", run, "--gate", gate)
    records = records_of(done.out)
    assert (done.code, done.out.splitlines()[-4:]) == (
        0,
        [
            "answer: yes",
            f"production is {run} from now on",
            f"records  {records}",
            "next: vox serve production",
        ],
    )
    facts = json.loads((records / "promotion.json").read_text())
    assert facts["candidate"]["reference"] == str(run)
    assert facts["current"]["reference"] == str(llama.resolve())
    assert facts["decision"]["answer"] == "yes" and facts["leakage"]["trained"] == 16
    words = ("--dtype", "fp32", "--backend", "cpu", "--max-tokens", 2)
    answers = [vox("generate", name, "Was 5 so?", *words).out for name in ("production", run)]
    assert answers[0] == answers[1]
    assert vox("merge", "production", "--backend", "cpu").code == 0
    assert Path("production-merged").is_dir()
    assert vox("export", "production", "--to", "mlx", "--out", "converted").code == 0
    listed = json.loads(vox("registry", "list", "--json").out)
    assert listed["production"]["promotion"] == str(records)


def test_a_no_and_too_little_evidence_move_nothing(vox, gate, run, other_llama) -> None:
    done = vox("promote", other_llama, "--gate", gate, "--over", run)
    last, step = done.out.splitlines()[-2:]
    assert (done.code, last) == (1, "answer: no (failed: yes)")
    pages = re.findall(r"\S+\.html", step)
    assert step.startswith("next: compare the answers in ") and len(pages) == 2
    assert all(Path(page).is_file() for page in pages)
    assert "has no record of its training rows" in done.err
    assert "leakage not known (limit 0, undecided)" in done.out
    rows = [json.loads(line) for line in gate.with_name("yes.jsonl").open()][:6]
    rows[0]["ideal"] = next(each for each in rows[0]["choices"] if each != rows[0]["ideal"])
    gate.with_name("yes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = json.loads(vox("promote", run, "--gate", gate, "--json").out)
    assert done["decision"]["answer"] == "not enough evidence" and done["folder"] is None
    assert not Path("registry").exists()


def test_records_alone_give_the_decision(vox, gate, run) -> None:
    records = records_of(vox("promote", run, "--gate", gate).out)
    kept = Path(shutil.copytree(records, Path("kept", records.name)))
    for name in ("evals", "mine", "yes.toml", "yes.jsonl", "gate.toml"):
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert vox("promote", "production", "--verify").code == 0
    assert vox("promote", kept, "--verify").out.splitlines()[-2:] == [
        "answer: yes",
        f"the records in {kept} give this decision",
    ]
    own = kept / "candidate-cpu"
    for name in ("eval.jsonl", "scorecard.json", "evaluation.json"):
        before = (own / name).read_bytes()
        (own / name).write_bytes(before.replace(b"1.0", b"0.0", 1) + b"\n")
        done = vox("promote", kept, "--verify")
        assert (done.code, "VOX-V005" in done.err) == (1, True), name
        (own / name).write_bytes(before)
    facts = json.loads((kept / "promotion.json").read_text())
    facts["gate"]["require"][0]["superior"] = 0.1
    (kept / "promotion.json").write_text(json.dumps(facts))
    assert "promotion.json has changed" in vox("promote", kept, "--verify").err
    assert "VOX-C011" in vox("promote", "staging", "--verify").err


def rewritten(folder: Path, facts: Any) -> Path:
    """Records with other facts, all of whose digests were made anew."""
    from vox_eval.suites import json_digest

    facts.pop("digest", None)
    for key in facts["evaluations"]:
        for name in facts["evaluations"][key]:
            content = (folder / key / name).read_bytes()
            facts["evaluations"][key][name] = hashlib.sha256(content).hexdigest()
    digest = json_digest(facts)
    (folder / "promotion.json").write_text(json.dumps({"digest": digest, **facts}))
    return folder.rename(folder.with_name(f"{facts['name']}-{digest[:12]}"))


@pytest.fixture
def records(vox, gate, run) -> tuple[Path, Any]:
    """The folder of a promotion's records, and promotion.json."""
    folder = records_of(vox("promote", run, "--gate", gate).out)
    return folder, json.loads((folder / "promotion.json").read_text())


def test_records_whose_decision_was_written_by_hand(vox, records) -> None:
    folder, facts = records
    facts["measured"]["megabytes"], facts["decision"]["checks"][1]["found"] = 0.5, 0.25
    assert "by other findings" in vox("promote", rewritten(folder, facts), "--verify").err


@pytest.mark.parametrize(("roundoff", "code"), [(1e-15, 0), (1e-4, 1)])
def test_another_processor_adds_in_another_order(vox, records, monkeypatch, roundoff, code) -> None:
    """As OpenBLAS does on processors with and without AVX-512."""
    from vox_eval import gate, scorecard, statistics

    folder, _ = records
    for module in (gate, scorecard):
        monkeypatch.setattr(module, "mean", lambda *a: statistics.mean(*a) * (1 + roundoff))
    assert vox("promote", folder, "--verify").code == code


def test_records_with_a_digest_made_anew_are_not_those_of_the_registry(vox, records) -> None:
    """Or, without the registry, not those of the folder's name."""
    folder, facts = records
    for each in (facts["measured"], facts["decision"]["checks"][1]):
        each["megabytes" if "megabytes" in each else "found"] = 0.25
    moved = rewritten(folder, facts)
    assert vox("promote", moved, "--verify").code == 0  # by itself it is sound
    moved.rename(folder)
    assert "its folder another name" in vox("promote", folder, "--verify").err
    assert "or for other records" in vox("promote", "production", "--verify").err


def test_scorecards_of_different_suites_are_not_compared(vox, records, llama) -> None:
    folder, facts = records
    flags = ("--suite", "yes.toml", "--limit", 11, "--backend", "cpu", "--dtype", "fp32")
    assert vox("eval", llama, *flags, "--out", "other").code == 0
    for name in ("evaluation.json", "eval.jsonl", "scorecard.json"):
        shutil.copy(Path("other", name), folder / "current-cpu" / name)
    moved = rewritten(folder, facts)
    assert "scorecards of different suites" in vox("promote", moved, "--verify").err


def test_records_of_one_model_twice(vox, records) -> None:
    folder, facts = records
    for name in ("evaluation.json", "eval.jsonl", "scorecard.json"):
        shutil.copy(folder / "candidate-cpu" / name, folder / "current-cpu" / name)
    moved = rewritten(folder, facts)
    assert "candidate and current are one model" in vox("promote", moved, "--verify").err


def test_records_of_another_suite_than_its_digest(vox, records) -> None:
    folder, facts = records
    own = folder / "current-cpu/evaluation.json"
    evaluation = json.loads(own.read_text())
    evaluation["suite"]["tasks"]["yes"]["rows"] = "0" * 64
    decides = {k: v for k, v in evaluation.items() if k not in ("format", "digest")}
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    own.write_text(json.dumps({**evaluation, "digest": digest}))
    card = own.with_name("scorecard.json")
    card.write_text(json.dumps({**json.loads(card.read_text()), "digest": digest}))
    moved = rewritten(folder, facts)
    assert "of another suite" in vox("promote", moved, "--verify").err


def test_leaked_rows_are_a_no(vox, gate, run, llama, trained, monkeypatch) -> None:
    monkeypatch.setattr(cli, "SHOWN_LEAKS", 1)
    rows = gate.with_name("yes.jsonl")
    rows.write_text(re.sub(r"Was \d+ so", "Is 3 good", rows.read_text(), count=1))
    done = vox("promote", run, "--gate", gate)
    assert (done.code, done.out.splitlines()) == (
        1,
        [
            "leakage 0.08333 (limit 0, failed)",
            f"leaked: {rows}:1 (yes) is {trained.with_name('train.jsonl')}:4",
            "and 1 more; --json lists all",
            "answer: no (failed: leakage)",
            "next: take these rows out of the suites, or train again without them",
        ],
    )
    assert not Path("evals").exists()  # no evaluation could change the answer
    gate.write_text(GATE + "[limits]\nleakage = 0.1")
    move("production", "runs/theirs", "theirs")
    done = vox("promote", run, "--gate", gate, "--over", llama)
    assert done.code == 0
    assert f"is {run} from now on, instead of runs/theirs, which was not compared" in done.out


def test_leakage_that_is_not_known_is_no_yes(vox, gate, run) -> None:
    """Of a copy of the run's adapter, which shows everything else."""
    (run / "plan.json").unlink()
    done = vox("promote", run, "--gate", gate, "--json")
    decision = json.loads(done.out)["decision"]
    assert (done.code, decision["answer"]) == (1, "not enough evidence")
    assert {each["state"] for each in decision["findings"]} == {"met"}
    assert "name the run itself" in done.err
    gate.write_text(GATE + "[limits]\nleakage = 1")
    done = vox("promote", run, "--gate", gate)
    assert (done.code, "leakage not known (no limit)" in done.out) == (0, True)
    assert vox("promote", "production", "--verify").code == 0


def test_size_and_speed_are_limits(vox, gate, run) -> None:
    gate.write_text(GATE + "[limits]\nmegabytes = 0.01\nseconds-per-answer = 60")
    done = vox("promote", run, "--gate", gate)
    assert done.code == 1
    assert "(limit 0.01, failed)" in done.out and "(limit 60, met)" in done.out


def test_two_backends_have_to_agree(vox, gate, run) -> None:
    pytest.importorskip("mlx.core")
    gate.write_text(GATE.replace('["cpu"]', '["cpu", "mlx"]').replace('dtype = "fp32"', ""))
    done = vox("promote", run, "--gate", gate)
    assert (done.code, "backend-differences 0 (limit 0, met)" in done.out) == (0, True)
    records = records_of(done.out)
    assert len([path for path in records.iterdir() if path.is_dir()]) == 4
    assert vox("promote", "production", "--verify").code == 0


# --- models that cannot be promoted ---------------------------------------------------------------


def test_a_run_whose_base_is_gone(vox, gate, run) -> None:
    config = json.loads((run / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(run / "gone")
    (run / "adapter_config.json").write_text(json.dumps(config))
    done = vox("promote", run, "--gate", gate)
    assert (done.code, "VOX-M001" in done.err, Path("evals").exists()) == (2, True, False)


def test_a_run_whose_proof_fails(vox, gate, run) -> None:
    """Its adapter was changed after training."""
    weights = load_file(run / "adapter_model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + np.float32(0.5)
    save_file(weights, run / "adapter_model.safetensors", {"format": "pt"})
    done = vox("promote", run, "--gate", gate)
    assert (done.code, "VOX-V004" in done.err, Path("evals").exists()) == (1, True, False)


def test_there_has_to_be_another_model(vox, gate, run, llama) -> None:
    assert "none was promoted before" in vox("promote", llama, "--gate", gate).err
    assert "the same model" in vox("promote", run, "--gate", gate, "--over", run).err
    assert vox("promote", run, "--gate", gate).code == 0
    assert "the same model" in vox("promote", run, "--gate", gate).err


def test_a_wrong_command_line(vox, gate, run) -> None:
    assert vox("promote", run).code == 2
    assert vox("promote", run, "--verify", "--gate", gate).code == 2
    assert "VOX-C012" in vox("promote", run, "--gate", "none.toml").err


# --- the registry ---------------------------------------------------------------------------------


def move(name: str, reference: str, digest: str) -> None:
    entry = {"reference": reference, "digest": digest, "title": "", "promotion": ""}
    now = registry.current(name)
    with registry.changing(name, now["digest"] if now else None):
        registry.move(name, **entry)


def test_rolling_back_goes_back_one_promotion_at_a_time(vox) -> None:
    for each in ("a", "b", "c"):
        move("production", each, each)
    assert vox("registry", "rollback", "production").out == "production is b from now on\n"
    assert registry.roll_back("production") == "a"
    done = vox("registry", "rollback", "production")
    assert (done.code, "VOX-M009" in done.err) == (2, True)
    move("production", "d", "d")
    assert registry.roll_back("production") == "a"
    kinds = [each.get("rolled_back") for each in registry.history("production")]
    assert kinds == [None, None, None, "c", "b", None, "d"]
    assert vox("registry", "show", "production").out.count("rolled back to") == 3
    assert "VOX-M009" in vox("registry", "rollback", "nothing").err
    done = vox("registry", "show", "nothing")
    assert (done.code, "no such name" in done.err, "production" in done.err) == (2, True, True)
    done = vox("generate", "productoin", "hello")
    assert (done.code, "did you mean production?" in done.err) == (2, True)


def test_a_name_that_is_hidden_or_broken_does_not_keep_the_others_from_the_list(vox) -> None:
    for each in ("production", "staging", "test"):
        move(each, "a", "a")
    Path("staging").mkdir()
    Path("registry/test.json").write_text("{")
    done = vox("registry", "list")
    lines = [line.split()[:2] for line in done.out.splitlines()[1:]]
    assert (done.code, lines) == (0, [["production", "a"], ["staging", "hidden"], ["test", "the"]])
    for command in ("show", "rollback"):
        assert "means something else" in vox("registry", command, "staging").err


def test_nothing_is_rolled_back_to_a_run_that_is_gone(vox, tmp_path) -> None:
    move("production", str(tmp_path / "gone"), "a")
    move("production", "b", "b")
    done = vox("registry", "rollback", "production")
    assert (done.code, "the model before is gone" in done.err) == (2, True)
    assert digest_of(Path("registry/production.json")) == "b"


def test_a_model_that_was_promoted_twice_is_rolled_back_once() -> None:
    """As with --over another model than the current one."""
    for each in ("a", "b", "b"):
        move("production", each, each)
    assert registry.roll_back("production") == "a"


def test_a_roll_back_is_computed_under_the_lock(monkeypatch) -> None:
    """Another process promotes at the last moment before."""
    for each in ("a", "b"):
        move("production", each, each)
    held = registry._held

    @contextmanager
    def late(name: str) -> Iterator[None]:
        monkeypatch.setattr(registry, "_held", held)
        move("production", "c", "c")
        with held(name):
            yield

    monkeypatch.setattr(registry, "_held", late)
    assert registry.roll_back("production") == "b"


def test_a_model_that_changed_after_its_promotion_is_refused(vox, run) -> None:
    move("production", str(run), "0" * 64)
    done = vox("generate", "production", "hello")
    assert (done.code, "VOX-M009" in done.err) == (2, True)


def test_a_promoted_model_that_changed_is_not_compared_with(vox, gate, run, llama) -> None:
    move("production", str(llama), "0" * 64)
    assert "VOX-M009" in vox("promote", run, "--gate", gate).err


@pytest.mark.parametrize("content", ["", "{}", '{"current": {"reference": 1}}', "[]"])
def test_a_registry_that_cannot_be_read(vox, gate, run, content) -> None:
    Path("registry").mkdir()
    Path("registry/production.json").write_text(content)
    for words in (("generate", "production", "x"), ("registry", "rollback", "production")):
        assert "VOX-M009" in vox(*words).err, words
    assert "VOX-M009" in vox("promote", run, "--gate", gate).err
    assert Path("registry/production.json").read_text() == content


def test_a_name_that_means_something_else_is_refused(vox, gate, run) -> None:
    for name in ("mine", "smollm2-135m"):
        gate.write_text(f'name = "{name}"' + GATE)
        assert "means something else" in vox("promote", run, "--gate", gate).err


def test_a_name_that_another_process_has_moved(vox, gate, run, monkeypatch) -> None:
    from vox_eval import promotion

    def meanwhile(*given: object) -> dict[str, float]:
        move("production", "theirs", "theirs")
        return {"megabytes": 1.0}

    monkeypatch.setattr(promotion, "_measured", meanwhile)
    done = vox("promote", run, "--gate", gate)
    assert (done.code, "was moved by another process" in done.err) == (2, True)
    assert digest_of(Path("registry/production.json")) == "theirs"
    assert not Path("registry/promotions").exists()


def test_a_registry_that_another_process_holds() -> None:
    with locked(RunFolder(Path("registry"))), pytest.raises(ModelError, match="is changing"):
        move("production", "a", "a")


MOVES = """
import sys
sys.path[:0] = {path!r}
from vox_core.errors import VoxError
from vox_eval import registry
done = 0
while done < 10:
    now = registry.current("production")
    try:
        with registry.changing("production", now and now["digest"]):
            name = f"{{sys.argv[1]}}{{done}}"
            entry = dict(reference=name, digest=name, title="", promotion="")
            registry.move("production", **entry)
            done += 1
    except VoxError as error:
        assert error.code == "VOX-M009", error
"""


def test_a_name_that_is_moved_while_it_is_read_is_read_again(monkeypatch) -> None:
    for name in "ab":
        with registry.changing("production", None if name == "a" else "a"):
            registry.move("production", reference=name, digest=name, title="", promotion="")
    expected, read = registry.history("production"), registry.promoted
    before = iter([expected[0]])
    monkeypatch.setattr(registry, "promoted", lambda name: next(before, None) or read(name))
    assert registry.history("production") == expected


def test_two_processes_at_once_lose_no_change() -> None:
    code = MOVES.format(path=[path for path in sys.path if path])
    both = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "ab"]
    assert [each.wait() for each in both] == [0, 0]
    found = [each["reference"] for each in registry.history("production")]
    assert sorted(found) == sorted(f"{name}{n}" for name in "ab" for n in range(10))
    assert [each for each in found if each[0] == "a"] == [f"a{n}" for n in range(10)]
