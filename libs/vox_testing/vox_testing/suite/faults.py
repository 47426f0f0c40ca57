"""Test errors and stdout: errors are `VoxError`s, and only results go to stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vox_core.contract import AdapterState, LowRank, Sampling, Step, StepSkipped
from vox_core.errors import PluginError, VoxError
from vox_core.weights import WEIGHTS, SafetensorsFile, write_safetensors
from vox_testing.jobs import curve, stirred
from vox_testing.llama import write_llama
from vox_testing.subject import Run, Subject
from vox_testing.suite.load import TOKENS
from vox_testing.suite.loss import distance
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
    with pytest.raises(VoxError) as caught:
        vox_subject.load(model=folder).logits(TOKENS)
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
def test_an_adapter_of_another_model_is_refused(vox_subject: Subject) -> None:
    """The backend refuses an adapter of another model, in any words."""
    module = LowRank(np.ones((4, 64), np.float32), np.ones((64, 4), np.float32), 8.0)
    adapter = AdapterState("lora", {"model.layers.99.mlp.up_proj": module})
    with pytest.raises(VoxError):
        vox_subject.load(adapter).logits(TOKENS)


@trains
@pytest.mark.parametrize("bad", [1, 2])
def test_a_step_that_is_not_finite_is_skipped(vox_subject: Subject, bad: int) -> None:
    """A skipped step is reported, changes nothing to the bit, and AdamW does not count it."""
    steps = curve(4, groups=2)
    broken = [_infinite(one) if one.number == bad else one for one in steps]
    run = vox_subject.train(broken)
    (told,) = [event for event in run.events if isinstance(event, StepSkipped)]
    assert told.step == bad
    assert told.loss is None or not math.isfinite(told.loss)
    assert [event.step for event in run.steps] == [n for n in (1, 2, 3, 4) if n != bad]
    assert (run.state.step, run.state.skipped, run.state.updates) == (4, 1, 3)
    good = [one for one in steps if one.number != bad]
    alike = vox_subject.train([replace(one, number=n) for n, one in enumerate(good, 1)])
    _require_alike(vox_subject, run, alike)
    assert run.losses == pytest.approx(alike.losses, rel=vox_subject.tolerance.loss)


@trains
@pytest.mark.parametrize("bad", [1, 2])
def test_a_run_goes_on_after_a_skipped_step(vox_subject: Subject, bad: int) -> None:
    """A run resumed right after a skipped step equals the uninterrupted one."""
    plan = vox_subject.plan(dropout=0.1)
    steps = [_infinite(one) if one.number == bad else one for one in curve(4)]
    whole = vox_subject.train(steps, plan)
    first = vox_subject.train(steps[:bad], plan)
    assert (first.state.step, first.state.skipped) == (bad, 1)
    second = vox_subject.train(steps[bad:], plan, first.state)
    assert (second.state.step, second.state.skipped) == (4, 1)
    _require_alike(vox_subject, second, whole)


@trains
@merges
@loads
def test_nothing_is_written_to_stdout(
    vox_subject: Subject, capfd: pytest.CaptureFixture[str]
) -> None:
    """stdout belongs to the command, whose `--json` output programs read."""
    method = vox_subject.declared.manifest.capabilities.methods[0]
    adapter, targets, weights = material(vox_subject, method)
    vox_subject.train(curve(2), vox_subject.plan(method=method), checkpoint_every=1)
    vox_subject.merge(adapter, targets, weights.read)
    model = vox_subject.load(stirred(vox_subject.start(vox_subject.plan(method=method))).adapter)
    list(model.generate(TOKENS, Sampling(max_tokens=2)))
    model.close()
    assert capfd.readouterr().out == ""


def _infinite(step: Step) -> Step:
    """The step with a loss that no dtype can hold."""
    batches = tuple(
        replace(one, weights_T=np.where(one.weights_T > 0, np.inf, 0).astype(np.float32))
        for one in step.batches
    )
    return replace(step, batches=batches)


def _require_alike(vox_subject: Subject, run: Run, other: Run) -> None:
    apart = distance(run.state, other.state)
    assert apart < vox_subject.tolerance.adapter
    assert apart == 0 or not vox_subject.on_cpu


def _require_told(error: VoxError) -> None:
    assert not isinstance(error, PluginError), f"the hook raised {error.found}"
    assert error.remedy
