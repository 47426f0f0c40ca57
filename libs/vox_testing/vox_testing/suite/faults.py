"""Test errors and stdout: errors are `VoxError`s, and only results go to stdout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vox_core.contract import AdapterState, TrainState
from vox_core.errors import AdapterError, PluginError, VoxError
from vox_core.weights import WEIGHTS, SafetensorsFile, write_safetensors
from vox_testing.jobs import curve
from vox_testing.llama import write_llama
from vox_testing.subject import NAME, Subject
from vox_testing.suite.load import TOKENS
from vox_testing.suite.merge import material
from vox_testing.suite.requirements import loads, merges, needs, trains


def _without_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def _of_unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))


def _without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _without_one_tensor(folder: Path) -> None:
    _rewrite(folder, lambda name, value: None if name.endswith("0.mlp.up_proj.weight") else value)


def _with_a_wrong_shape(folder: Path) -> None:
    _rewrite(folder, lambda name, value: value[:-1] if name.endswith("up_proj.weight") else value)


def _rewrite(folder: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> None:
    file = SafetensorsFile(folder / WEIGHTS)
    kept = {name: change(name, np.array(file.read(name))) for name in file.tensors}
    tensors = {name: value for name, value in kept.items() if value is not None}
    specs = {name: ("F32", value.shape) for name, value in tensors.items()}
    write_safetensors(folder / WEIGHTS, specs, tensors.items())


BROKEN = {
    "no configuration": _without_configuration,
    "an unknown type": _of_unknown_type,
    "no weights": _without_weights,
    "a tensor is missing": _without_one_tensor,
    "a wrong shape": _with_a_wrong_shape,
}


@loads
@needs(family="llama")
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_model_is_told_as_such(vox_subject: Subject, fault: str, tmp_path: Path) -> None:
    """A broken model raises a `VoxError`; any other exception is a fault of the plugin."""
    folder = write_llama(tmp_path / "model")
    BROKEN[fault](folder)
    with pytest.raises(VoxError) as caught, vox_subject.loaded(model=folder) as model:
        model.logits(TOKENS)
    _require_told(caught.value)


@trains
@needs(family="llama")
@pytest.mark.parametrize("fault", ["a tensor is missing", "a wrong shape"])
def test_a_broken_model_is_not_trained(vox_subject: Subject, fault: str, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    BROKEN[fault](folder)
    plan = vox_subject.plan()
    with pytest.raises(VoxError) as caught:
        vox_subject.train(curve(1), plan, vox_subject.start(plan), model=folder)
    _require_told(caught.value)


@loads
@trains
@pytest.mark.parametrize("fault", ["another path", "another shape"])
def test_an_adapter_of_another_model_is_refused(vox_subject: Subject, fault: str) -> None:
    """By `add_adapter` and `add_learner`, with A002; the next one that fits is taken."""
    right = vox_subject.start(vox_subject.plan())
    path, module = next(iter(right.adapter.modules.items()))
    wrong = {
        "another path": {"model.layers.99.mlp.up_proj": module},
        "another shape": {path: replace(module, A_RI=module.A_RI[:, 1:])},
    }[fault]
    adapter = AdapterState(right.adapter.method, wrong)
    with vox_subject.loaded() as model:
        with pytest.raises(AdapterError, match="VOX-A002"):
            model.add_adapter("a", adapter)
        model.add_adapter("a", right.adapter)
        model.logits(TOKENS, "a")
    with vox_subject.trainer() as trainer, pytest.raises(AdapterError, match="VOX-A002"):
        trainer.add_learner(NAME, TrainState(0, adapter))


@trains
@merges
@loads
def test_nothing_is_written_to_stdout_or_beside_the_weights(
    vox_subject: Subject, capfd: pytest.CaptureFixture[str]
) -> None:
    """stdout belongs to the command, whose `--json` output programs read, and the model's folder to
    the user, or a cache that has the hash of each file."""
    before = sorted(vox_subject.model.iterdir())
    adapter, targets, weights = material(vox_subject)
    vox_subject.train(curve(1))
    vox_subject.merge(adapter, targets, weights.read)
    with vox_subject.loaded(adapter) as model:
        model.logits(TOKENS)
        model.insert(0, TOKENS, "a")
        model.advance({})
    assert capfd.readouterr().out == ""
    assert sorted(vox_subject.model.iterdir()) == before


def _require_told(error: VoxError) -> None:
    assert not isinstance(error, PluginError), f"the hook raised {error.found}"
    assert error.remedy
