"""A run's own files, damaged by somebody, as a resume finds them: an error that names the key."""

from __future__ import annotations

import json

import pytest

from tests.run.interrupted import assert_same_run, cut_after, killed, resumed
from vox_core.contract import CheckpointWritten
from vox_core.errors import AdapterError, InputError
from vox_core.run.folder import MANIFEST, PLAN, RunFolder
from vox_core.run.resume import last_step, plan_of
from vox_core.run.train import train

KEPT = {
    "settings": {"model": "m"},
    "contract": {"total_steps": 4},
    "digest": "0",
    "dtype": "fp32",
    "backend": "cpu",
    "backend_version": "1",
    "micro_batch_tokens": 96,
    "packing": "rows",
    "tuning": {},
}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    (tmp_path / PLAN).write_text(json.dumps(KEPT))
    return RunFolder(tmp_path)


@pytest.mark.parametrize("key", KEPT)
@pytest.mark.parametrize("how", ["missing", "of another type"])
def test_a_key_of_the_plan(run, key, how):
    assert plan_of(run) == KEPT
    plan = {**KEPT, key: [1]} if how != "missing" else {k: KEPT[k] for k in KEPT if k != key}
    (run.path / PLAN).write_text(json.dumps(plan))
    with pytest.raises(AdapterError) as caught:
        plan_of(run)
    (fault,) = caught.value.faults
    assert caught.value.code == "VOX-A001"
    assert fault.startswith(f"{key}: ")
    assert caught.value.where == str(run.path / PLAN)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"contract": {}}, "contract.total_steps"),
        ({"tuning": 1}, "tuning"),
        ({"changes": 1}, "changes"),
        ({"sources": {"data": [{"path": "a"}]}}, "sources.data.0.sha256"),
    ],
)
def test_what_is_within_a_key_of_the_plan(run, more, fault):
    (run.path / PLAN).write_text(json.dumps({**KEPT, **more}))
    with pytest.raises(AdapterError) as caught:
        plan_of(run)
    assert caught.value.faults[0].startswith(f"{fault}: ")


def test_the_last_step_of_a_manifest(run):
    def of(**manifest: object) -> int:
        (run.path / MANIFEST).write_text(json.dumps(manifest))
        return last_step(run)

    assert of(step=3, last_step=5) == 5
    for manifest in ({}, {"step": 3}, {"step": 3, "last_step": None}):
        with pytest.raises(AdapterError) as caught:
            of(**manifest)
        assert caught.value.faults[0].startswith("last_step: ")


def test_a_resume_says_so(tiny, settings):
    """The command as a whole, with each of the files; the last of them costs nothing."""
    asked = settings(tiny("llama"), save_every=2)
    killed(asked, cut_after(2, CheckpointWritten))
    plan = (asked.out / PLAN).read_text()
    (asked.out / PLAN).write_text("{}")
    with pytest.raises(InputError) as caught:
        resumed(asked.out)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        *("settings", "contract", "digest", "dtype", "backend", "backend_version"),
        *("micro_batch_tokens", "packing", "tuning"),
    ]
    (asked.out / PLAN).write_text(plan)
    (asked.out / MANIFEST).write_text("{}")
    with pytest.raises(InputError, match="a run's own file does not say"):
        resumed(asked.out)
    (asked.out / MANIFEST).unlink()
    (asked.out / "bad_batches.jsonl").write_bytes(b"\xff\xfe\n")
    assert resumed(asked.out).steps == 5
    through = train(settings(tiny("llama"), out=asked.out.with_name("whole")))
    assert_same_run(asked.out, through.run)
