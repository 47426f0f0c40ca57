"""Checkpoints that are not what was written: always detected, named and passed over, never resumed
in part."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.run.faulty import RUN, made_up, same
from vox_core.contract import TrainState
from vox_core.errors import PlanError
from vox_core.run import checkpoint
from vox_core.run.checkpoint import BackendUse, Origin

FILES = (*checkpoint.FILES, checkpoint.MANIFEST)
PAGE = 4096


@pytest.fixture
def parent(tmp_path) -> Path:
    """Two checkpoints, the newer one of a few pages."""
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    for step in (1, 2):
        checkpoint.save(folder, made_up(step, wide=200), Origin(**RUN))
    return folder


def require_passed_over(parent: Path, *named: str) -> None:
    """The newer one is passed over, in words that name the files; and then set back."""
    state, (skipped,) = checkpoint.load_newest(parent)
    assert same(state, made_up(1, wide=200))
    assert skipped.startswith("step-2: ")
    for name in named:
        assert name in skipped
    (aside,) = parent.glob("damaged-step-2-*")
    aside.rename(parent / "step-2")


@pytest.mark.parametrize("name", FILES)
def test_truncated_at_every_page(name, parent):
    path = parent / "step-2" / name
    whole = path.read_bytes()
    for size in {*range(0, len(whole), PAGE), len(whole) - 1}:
        path.write_bytes(whole[:size])
        require_passed_over(parent, name)
    path.write_bytes(whole + b"\0")
    require_passed_over(parent, name)
    path.write_bytes(whole)
    assert checkpoint.load_newest(parent)[1] == []


@pytest.mark.parametrize("name", FILES)
def test_a_bit_is_flipped(name, parent):
    """Each bit of the manifest and of the state, and one in every so many of the tensors."""
    folder = parent / "step-2"
    whole = (folder / name).read_bytes()
    bits = range(0, 8 * len(whole), 1 if name == checkpoint.MANIFEST else 8 * len(whole) // 200 + 1)
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(flipped)
        assert name in (checkpoint.fault(folder) or ""), f"bit {bit}"
    require_passed_over(parent, name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_missing(name, parent):
    (parent / "step-2" / name).unlink()
    require_passed_over(parent, f"{name} is missing")


@pytest.mark.parametrize("names", list(itertools.combinations(FILES, 2)), ids="-".join)
def test_two_files_are_swapped(names, parent):
    one, other = (parent / "step-2" / name for name in names)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    if checkpoint.MANIFEST in names:  # where it is none, nothing else can be held against it
        require_passed_over(parent, checkpoint.MANIFEST)
    else:
        require_passed_over(parent, *names)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_swapped_with_that_of_another_step(name, parent):
    ours, theirs = (parent / step / name for step in ("step-2", "step-1"))
    ours.write_bytes(theirs.read_bytes())
    require_passed_over(parent)


def test_two_checkpoints_are_swapped(parent):
    one, other = parent / "step-1", parent / "step-2"
    one.rename(parent / "kept")
    other.rename(one)
    (parent / "kept").rename(other)
    with pytest.raises(PlanError) as caught:
        checkpoint.load_newest(parent)
    assert caught.value.faults == (
        "step-2: state.json is of step 1",
        "step-1: state.json is of step 2",
    )
    assert caught.value.code == "VOX-P003"


@pytest.mark.parametrize("name", FILES)
def test_a_link_is_not_followed(name, parent, tmp_path):
    path = parent / "step-2" / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    require_passed_over(parent, f"{name} ")


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file(name, parent):
    path = parent / "step-2" / name
    path.unlink()
    path.mkdir()
    require_passed_over(parent, name)


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.STATE])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"{" * 100_000,
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"format": "vox-checkpoint/3"}',
        b'{"format": "vox-checkpoint/3", "files": {"../../evil": {"size": 1, "sha256": ""}}}',
        b'{"step": -1}',
        b'{"step": 1e999}',
    ],
)
def test_json_that_is_something_else_is_an_error_of_voxs_own(name, content, parent):
    kind = checkpoint.CheckpointManifest if name == checkpoint.MANIFEST else checkpoint.StateRecord
    (parent / "step-2" / name).write_bytes(content + b"\n")
    with pytest.raises(PlanError) as caught:
        checkpoint.read_json(parent / "step-2", name, kind)
    assert caught.value.code == "VOX-P003"
    require_passed_over(parent, name)


def test_json_that_is_too_large_is_not_parsed(parent, monkeypatch):
    monkeypatch.setattr(checkpoint, "LARGEST", 100)
    with pytest.raises(PlanError) as caught:
        checkpoint.load(parent / "step-2")
    assert caught.value.found == "MANIFEST.json has more than 100 bytes"


def renewed(folder: Path) -> None:
    """The manifest of what is there, as somebody would write it who means harm."""
    files = {
        name: checkpoint.Entry(
            size=(folder / name).stat().st_size,
            sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        )
        for name in checkpoint.FILES
    }
    text = checkpoint.CheckpointManifest(files=files).model_dump_json()
    (folder / checkpoint.MANIFEST).write_text(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: state["alpha"].update({"model.none": 8.0}),
            "has no model.none.lora_A",
        ),
        (lambda state: state["alpha"].popitem(), "which state.json does not name"),
        (lambda state: state["saved"].append("gone"), "has no gone"),
        (lambda state: state.update(step=9), "state.json is of step 9"),
        (lambda state: state.update(method="other"), "method"),
        (lambda state: state.update(more=1), "more"),
        (lambda state: state.pop("alpha"), "alpha"),
        (lambda state: state.update(step="2"), "step"),
    ],
)
def test_a_state_that_does_not_fit_its_tensors(change, words, parent):
    path = parent / "step-2" / checkpoint.STATE
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    renewed(parent / "step-2")
    require_passed_over(parent, words)


def test_moments_that_are_no_tensors_are_passed_over(parent):
    folder = parent / "step-2"
    shutil.copyfile(folder / checkpoint.ADAPTER, folder / checkpoint.MOMENTS)
    renewed(folder)
    require_passed_over(parent, checkpoint.MOMENTS, "does not hold two moments")


def test_what_stands_in_the_way_of_a_step_is_verified_or_set_aside(parent):
    """A run that was gone on with from step 1, past a damaged step 2, comes to step 2 again."""
    path = parent / "step-2" / checkpoint.MOMENTS
    path.write_bytes(path.read_bytes()[:-1])
    checkpoint.save(parent, made_up(2, wide=200), Origin(**RUN))
    assert [*parent.glob("damaged-step-2-*")]
    assert same(checkpoint.load(parent / "step-2"), made_up(2, wide=200))
    before = (parent / "step-2").stat()
    checkpoint.save(parent, made_up(2, wide=200), Origin(**RUN))
    assert (parent / "step-2").stat() == before


def test_a_checkpoint_says_where_it_is_from(tmp_path):
    origin = Origin(
        **RUN,
        epoch=0.5,
        elapsed=12.5,
        versions={"python": "3"},
        backends=(BackendUse(first_step=1, backend="made-up", device="a CPU", dtype="fp32"),),
        losses=(2.5, None, 0.1),
        validations=((0, 2.0), (3, 1.5), (4, None)),
    )
    folder = checkpoint.save(tmp_path / "checkpoints", made_up(4), origin)
    there = checkpoint.origin(tmp_path / "checkpoints", 4)
    assert {key: getattr(there, key) for key in dict(origin)} == dict(origin)
    assert checkpoint.origin(tmp_path / "checkpoints", 5) == Origin()
    state = json.loads((folder / checkpoint.STATE).read_text())
    assert re.fullmatch("c{64}", state["contract"])
    assert {"seed", "backends", "versions", "elapsed", "epoch", "validations"} <= state.keys()
    assert same(checkpoint.load(folder), made_up(4))


def test_arrays_of_another_layout_come_back_the_same(tmp_path):
    state = made_up(1)
    turned = {n: np.asfortranarray(v) for n, v in state.adapter.tensors().items()}
    other = TrainState(1, state.adapter.with_tensors(turned), state.moments)
    folder = checkpoint.save(tmp_path / "checkpoints", other, Origin(**RUN))
    assert same(checkpoint.load(folder), state)


def test_matrices_that_do_not_fit_are_named(parent):
    """With digests that match: only a faulty writer, or somebody, makes such a checkpoint."""
    state = made_up(2, wide=200)
    path, module = next(iter(state.adapter.modules.items()))
    wrong = replace(module, B_OR=np.zeros((3, 99), np.float32))
    adapter = replace(state.adapter, modules={**state.adapter.modules, path: wrong})
    moments = {**state.moments, f"{path}.lora_B.weight": (wrong.B_OR, wrong.B_OR)}
    shutil.rmtree(parent / "step-2")
    checkpoint.save(parent, replace(state, adapter=adapter, moments=moments), Origin(**RUN))
    require_passed_over(parent, path, "do not fit")
