"""`vox promote` and `vox registry` on tiny Llamas: records, names, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vox_core.api.runs import RunFolder, locked
from vox_core.errors import ModelError
from vox_eval import registry

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


def digest_of(path: Path) -> str:
    return json.loads(path.read_text())["current"]["digest"]


def test_a_yes_moves_the_name_that_commands_take(vox, gate, run, llama) -> None:
    done = vox("promote", run, "--gate", gate)
    assert (done.code, done.out.splitlines()[-3:-1]) == (
        0,
        ["answer: yes", f"production is {run} from now on"],
    )
    records = Path(done.out.split()[-1])
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
    assert (done.code, done.out.splitlines()[-1]) == (1, "answer: no")
    assert "has no record of its training rows" in done.err
    rows = [json.loads(line) for line in gate.with_name("yes.jsonl").open()][:6]
    rows[0]["ideal"] = next(each for each in rows[0]["choices"] if each != rows[0]["ideal"])
    gate.with_name("yes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = json.loads(vox("promote", run, "--gate", gate, "--json").out)
    assert done["decision"]["answer"] == "not enough evidence" and done["folder"] is None
    assert not Path("registry").exists()


def test_records_alone_give_the_decision(vox, gate, run) -> None:
    records = Path(vox("promote", run, "--gate", gate).out.split()[-1])
    kept = Path(shutil.copytree(records, "kept"))
    for name in ("evals", "mine", "yes.toml", "yes.jsonl", "gate.toml"):
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert vox("promote", "production", "--verify").code == 0
    assert vox("promote", kept, "--verify").out.splitlines()[-1] == (
        "the records in kept give this decision"
    )
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


def test_records_whose_decision_was_written_by_hand(vox, gate, run) -> None:
    from vox_eval.promotion import _digest

    folder = Path(vox("promote", run, "--gate", gate).out.split()[-1])
    facts = json.loads((folder / "promotion.json").read_text())
    facts["measured"]["leakage"], facts["decision"]["checks"][0]["found"] = 0.5, 0.5
    del facts["digest"]
    (folder / "promotion.json").write_text(json.dumps({"digest": _digest(facts), **facts}))
    assert "by other findings" in vox("promote", folder, "--verify").err


def test_scorecards_of_different_suites_are_not_compared(vox, gate, run, llama) -> None:
    """In records whose digests were all made anew."""
    from vox_eval.promotion import _digest

    folder = Path(vox("promote", run, "--gate", gate).out.split()[-1])
    flags = ("--suite", "yes.toml", "--limit", 11, "--backend", "cpu", "--dtype", "fp32")
    assert vox("eval", llama, *flags, "--out", "other").code == 0
    facts = json.loads((folder / "promotion.json").read_text())
    for name in ("evaluation.json", "eval.jsonl", "scorecard.json"):
        shutil.copy(Path("other", name), folder / "current-cpu" / name)
        content = Path("other", name).read_bytes()
        facts["evaluations"]["current-cpu"][name] = hashlib.sha256(content).hexdigest()
    del facts["digest"]
    (folder / "promotion.json").write_text(json.dumps({"digest": _digest(facts), **facts}))
    assert "scorecards of different suites" in vox("promote", folder, "--verify").err


def test_leaked_rows_are_a_no(vox, gate, run) -> None:
    rows = gate.with_name("yes.jsonl")
    rows.write_text(re.sub(r"Was \d+ so", "Is 3 good", rows.read_text(), count=1))
    done = vox("promote", run, "--gate", gate)
    assert (done.code, done.out.splitlines()[-1]) == (1, "answer: no")
    assert "leaked: yes row" in done.out and "train.jsonl:4" in done.out
    gate.write_text(GATE + "[limits]\nleakage = 0.1")
    assert vox("promote", run, "--gate", gate).code == 0


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
    records = Path(done.out.split()[-1])
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


def test_two_processes_at_once_lose_no_change() -> None:
    code = MOVES.format(path=[path for path in sys.path if path])
    both = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "ab"]
    assert [each.wait() for each in both] == [0, 0]
    found = [each["reference"] for each in registry.history("production")]
    assert sorted(found) == sorted(f"{name}{n}" for name in "ab" for n in range(10))
    assert [each for each in found if each[0] == "a"] == [f"a{n}" for n in range(10)]
