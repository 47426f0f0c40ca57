"""`--adapter`: a run that starts from an adapter instead of a seeded one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vox_core as vox
from tests.run.bigram import HEAD
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.adapter.targets import linear_modules
from vox_core.contract import AdapterState, Objective, Weighed
from vox_core.errors import AdapterError, ConfigError, PlanError
from vox_core.run import inputs, weighing
from vox_core.weights import WeightFolder
from vox_testing.llama import write_llama

QUICK = {"dtype": "fp32", "batch_size": 2, "lr": 1e-2, "max_steps": 2, "valid": None}
SHAPE = {"rank": 4, "alpha": 8, "targets": HEAD}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture
def first(base: Path, data: Path, tmp_path: Path, bigrams) -> vox.Run:
    return vox.train(model=base, data=data, out=tmp_path / "first", **QUICK, **SHAPE)


def contract_of(run: vox.Run) -> dict:
    return json.loads((run.path / "plan.json").read_text())["contract"]


def loss_of(run: vox.Run) -> float:
    assert run.losses[0] is not None
    return run.losses[0]


def test_a_run_goes_on_from_the_adapter_of_another(first, base, data, tmp_path) -> None:
    then = vox.train(adapter=first, data=data, out=tmp_path / "then", **QUICK)
    assert loss_of(then) < loss_of(first), "the same rows, after two steps"
    adapter, was = contract_of(then)["adapter"], contract_of(first)["adapter"]
    assert was.pop("start") is None
    assert len(adapter.pop("start")) == 64
    # `lm_head` is no part of all-linear, so its name is the shortest that selects it.
    assert adapter == was
    made = json.loads((then.path / "vox_adapter.json").read_text())
    assert made["base"]["path"] == str(base)


def test_what_is_given_has_to_be_the_adapters(first, base, data, tmp_path) -> None:
    out = tmp_path / "out"
    for given, said in {
        ("rank", 8): "`rank` 8: the adapter has rank 4",
        ("alpha", 3.0): "`alpha` 3: the adapter has alpha 8",
        ("method", "rslora"): "`method` rslora: the adapter is lora",
        ("targets", "q_proj"): "`targets` q_proj: 2 modules, and the adapter has 1: lm_head",
    }.items():
        with pytest.raises(ConfigError) as caught:
            vox.train(adapter=first, data=data, out=out, **QUICK, **dict([given]))
        assert said in str(caught.value)
        assert not out.exists()
    vox.train(adapter=first, model=base, data=data, out=out, **QUICK, **SHAPE)


def test_an_adapter_of_another_base_is_refused(first, data, tmp_path, bigrams) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    out = tmp_path / "out"
    with pytest.raises(AdapterError, match="another base"):
        vox.train(adapter=first, model=other, data=data, out=out, **QUICK)
    with pytest.raises(AdapterError, match="no adapter to start from"):
        vox.train(adapter=other, data=data, out=out, **QUICK)
    with pytest.raises(AdapterError, match="no adapter to start from"):
        vox.train(adapter=tmp_path / "nowhere", data=data, out=out, **QUICK)
    assert not out.exists()
    assert len(bigrams) == 1, "no model was loaded"


def test_an_adapter_with_several_ranks_is_refused(first, base, data, tmp_path) -> None:
    state = read_adapter(first.path)
    module = state.modules[HEAD]
    modules = {
        "model.layers.0.self_attn.q_proj": replace(
            module,
            A_RI=np.zeros((2, module.A_RI.shape[1]), np.float32),
            B_OR=np.zeros((module.A_RI.shape[1], 2), np.float32),
        ),
        HEAD: module,
    }
    folder = tmp_path / "uneven"
    folder.mkdir()
    linear = linear_modules(WeightFolder(base).tensors, "llama")
    write_adapter(folder, AdapterState("lora", modules), base=str(base), modules=linear)
    with pytest.raises(AdapterError, match="several ranks"):
        vox.train(adapter=folder, data=data, out=tmp_path / "out", **QUICK)


def test_a_resume_needs_the_runs_own_copy_alone(first, data, tmp_path) -> None:
    settings = {**QUICK, "max_steps": 4, "save_every": 1}
    whole = vox.train(adapter=first, data=data, out=tmp_path / "whole", **settings)
    begun = vox.train(adapter=first, data=data, out=tmp_path / "begun", **settings, on_event=stop)
    assert begun.report.stopped
    shutil.rmtree(first.path)
    shutil.rmtree(begun.path / "checkpoints")  # it begins again
    (begun.path / "run.json").unlink()
    (begun.path / "vox_adapter.json").unlink()
    resumed = vox.train(resume=begun)
    assert resumed.losses == whole.losses
    expected = read_adapter(whole.path).tensors()
    for name, value in read_adapter(resumed.path).tensors().items():
        np.testing.assert_array_equal(value, expected[name])


def stop(event: object) -> None:
    """Ctrl-C after the second step."""
    import _thread

    if getattr(event, "step", None) == 2 and type(event).__name__ == "StepDone":
        _thread.interrupt_main()


def test_a_resume_under_another_adapter_is_refused(first, data, tmp_path) -> None:
    then = vox.train(adapter=first, data=data, out=tmp_path / "then", **QUICK, save_every=1)
    (then.path / "vox_adapter.json").unlink()
    other = tmp_path / "other"
    other.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(then.path / name, other)
    with pytest.raises(PlanError, match="`adapter`"):
        vox.train(resume=then, adapter=other)


class Above(Objective):
    """Raises log-probabilities above the reference's."""

    needs = frozenset({"reference"})

    def __init__(self) -> None:
        self.apart: list[float] = []

    def examples(self, row):
        return {"whole": row}

    def weigh(self, groups, totals):
        sides = [side for group in groups for side in group]
        self.apart += [float(np.abs(s.log_probs_K - s.reference_K).max()) for s in sides]
        return Weighed(0.0, [[np.ones_like(s.log_probs_K) for s in group] for group in groups])


def test_the_reference_is_the_starting_adapter(first, data, tmp_path, monkeypatch) -> None:
    objective = Above()
    monkeypatch.setattr(inputs, "objective_of", lambda spec: objective)
    monkeypatch.setattr("vox_core.data.rows.objective_of", lambda spec: objective)
    monkeypatch.setattr("vox_core.data.dataset_cache.identity_of", lambda spec: spec.name)
    keys = []
    cached = weighing.cached

    def recorded(kind, key, *rest):
        keys.append(key)
        return cached(kind, key, *rest)

    monkeypatch.setattr(weighing, "cached", recorded)
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))  # nothing is there already
    common = {**QUICK, "max_steps": 1, "batch_size": 6, "data": data / "train.jsonl"}
    vox.train(adapter=first, out=tmp_path / "a", objective="above", **common)
    assert objective.apart
    assert max(objective.apart) == 0, "before the first update the policy is the reference"
    model = json.loads((first.path / "vox_adapter.json").read_text())["base"]["path"]
    vox.train(model=model, out=tmp_path / "b", objective="above", **common, **SHAPE)
    assert max(objective.apart) == 0
    assert len({*keys}) == 2, "another entry of the cache"
