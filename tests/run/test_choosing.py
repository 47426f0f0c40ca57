"""Runs over rows that were chosen: what is trained, told, written and resumed."""

from __future__ import annotations

import json

import pytest

from tests.run.interrupted import cut_after, killed, resumed
from vox_core.config import DataSettings, TrainSettings, validate
from vox_core.contract import CheckpointWritten, DataPolicy, FineTuneContract, Notice
from vox_core.errors import ConfigError, PlanError
from vox_core.run.run_plan import plan_run
from vox_core.run.train import train

FAULTY = '{"prompt": "no answer"}'


@pytest.fixture
def rows(data):
    """`train.jsonl` alone, with a malformed row and two duplicates."""
    (data / "valid.jsonl").unlink()
    path = data / "train.jsonl"
    good = path.read_text().split("\n")
    path.write_text("\n".join([*good[:2], FAULTY, *good[2:], *good[:2]]))
    return path


def read(run, name):
    return json.loads((run / name).read_text())


def test_a_run_over_chosen_rows(rows, settings, tiny):
    chosen = {"malformed_rows": "skip", "max_skipped": 0.2, "dedup": "exact", "valid_share": 0.4}
    asked = settings(tiny("llama"), data=[rows], save_every=1, **chosen)
    told = []

    def observe(event):
        told.append(event)
        cut_after(2, CheckpointWritten)(event)

    killed(asked, observe)
    run = asked.out
    trained, held_out = read(run, "preflight.json")["data"], read(run, "preflight.json")["valid"]
    assert trained["rows"] + held_out["rows"] == 6 and trained["rows"] and held_out["rows"]
    assert trained["left_out"] == {"malformed": 1, "duplicate": 2}
    (file,) = read(run, "preflight.json")["rows"]["files"]
    assert (file["rows"], file["used"]) == (9, trained["rows"])
    assert file["held_out"] == held_out["rows"] and file["malformed"] == {"unknown form": 1}
    skipped = [json.loads(row) for row in (run / "skipped_rows.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in skipped] == [
        (3, "malformed"),
        (8, "duplicate"),
        (9, "duplicate"),
    ]
    assert skipped[1]["of"] == {"file": str(rows), "line": 1}
    notices = [event for event in told if isinstance(event, Notice)]
    (warning,) = [n.message for n in notices if "malformed" in n.message and n.level == "warning"]
    assert "1 malformed row is skipped (1 unknown form)" in warning
    assert any("2 duplicates are left out" in notice.message for notice in notices)
    policy = read(run, "plan.json")["contract"]["policy"]
    assert (policy["dedup"], policy["valid_share"], policy["max_skipped"]) == ("exact", 0.4, 0.2)

    with pytest.raises(PlanError) as caught:
        train(validate(TrainSettings, {"resume": run, "dedup": "none"}))
    assert "--dedup: 'exact' when it began, 'none' now" in caught.value.faults
    with pytest.raises(PlanError) as caught:
        train(validate(TrainSettings, {"resume": run, "min_chars": 1}))
    assert [*caught.value.faults] == ["--min-chars: 0 when it began, 1 now"]
    assert resumed(run).steps == 5


def test_held_out_rows_are_asked_for_once(data, rows, settings, tiny):
    with pytest.raises(ConfigError, match="asked for twice"):
        train(settings(tiny("llama"), valid=rows, valid_share=0.1))
    (data / "valid.jsonl").write_text(rows.read_text())
    with pytest.raises(ConfigError, match=r"valid\.jsonl"):
        train(settings(tiny("llama"), valid_share=0.1))


def test_a_leak_is_told(settings, tiny, data):
    trained = (data / "train.jsonl").read_text().splitlines()
    (data / "valid.jsonl").write_text("\n".join(trained[:2]))
    planned = plan_run(settings(tiny("llama")))
    (warning,) = [each.message for each in planned.notices() if each.level == "warning"]
    assert warning.startswith("2 validation rows also occur in the training data: ")
    assert warning.count("line 1") == 2


# --- the contract ---------------------------------------------------------------------------------


def contract(policy=None) -> FineTuneContract:
    some = {"model": None, "data": None, "adapter": None, "quant": "none", "optimizer": None}
    numbers = {"batch_size": 1, "seq_len": 2, "total_steps": 3, "seed": 4}
    return FineTuneContract(**some, **numbers, **({"policy": policy} if policy else {}))


def test_another_policy_is_another_contract():
    plain, other = contract(DataSettings().policy()), contract(DataPolicy(dedup="exact"))
    assert plain == contract()
    assert other.digest != plain.digest
    assert other.to_json()["policy"]["dedup"] == "exact"


def test_what_has_no_effect_makes_no_other_contract():
    def policy(**given):
        return DataSettings(**given).policy()

    assert policy(max_skipped=0.5, near_threshold=0.9) == DataPolicy()
    assert policy(category=("b", "a", "b")) == policy(category=("a", "b"))
    assert policy(malformed_rows="skip") == DataPolicy(malformed_rows="skip", max_skipped=0.01)
    assert policy(dedup="near") == DataPolicy(dedup="near", near_threshold=0.8)
