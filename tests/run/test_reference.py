"""Names that are almost those of an adapter."""

from __future__ import annotations

import shutil
import weakref

import numpy as np
import pytest

from vox_core.contract import AdapterState, LazyMapping
from vox_core.errors import AdapterError
from vox_core.run.reference import adapter_digest, resolve_reference
from vox_core.run.train import train


def test_a_file_of_an_adapter_is_no_adapter(tiny, settings):
    run = train(settings(tiny("llama"), max_steps=1)).run
    with pytest.raises(AdapterError) as caught:
        resolve_reference(str(run / "adapter_model.safetensors"))
    assert f"name the folder: {run}" in str(caught.value)


def test_a_folder_of_runs_is_no_run(tiny, settings, tmp_path):
    runs = tmp_path / "runs"
    for name in ("a", "b"):
        train(settings(tiny("llama"), max_steps=1, out=runs / name))
    with pytest.raises(AdapterError) as caught:
        resolve_reference(str(runs))
    assert caught.value.found == "a, b"
    assert str(runs / "a") in str(caught.value.remedy)


def test_a_run_whose_adapters_are_inside_names_one(tiny, settings, tmp_path):
    """Clients of `vox tinker` save in `weights` of their run folder."""
    run, folder = train(settings(tiny("llama"), max_steps=1)).run, tmp_path / "client"
    (folder / "weights").mkdir(parents=True)
    shutil.copy(run / "plan.json", folder)
    with pytest.raises(AdapterError, match="before anything was saved") as caught:
        resolve_reference(str(folder))
    assert "client" in caught.value.remedy
    shutil.copy(run / "preflight.json", folder)
    with pytest.raises(AdapterError, match="before anything was saved") as caught:
        resolve_reference(str(folder))
    assert f"vox train --resume {folder}" in caught.value.remedy
    (folder / "preflight.json").unlink()
    run.rename(folder / "weights" / "final")
    with pytest.raises(AdapterError, match="weights/final"):
        resolve_reference(str(folder))


def test_a_model_folder_beside_runs_is_a_model(tiny):
    model = tiny("llama")
    assert resolve_reference(str(model)).base.path == model


def test_a_digest_of_a_whole_model_holds_one_tensor_at_a_time():
    read, alive = [], []

    def values(name: str) -> np.ndarray:
        alive.append(sum(each() is not None for each in read))
        tensor = np.full(3, len(name), np.float32)
        read.append(weakref.ref(tensor))
        return tensor

    adapter_digest("", AdapterState("full", {}, LazyMapping("abcdef", values)))
    assert len(read) == 6 and max(alive) <= 1
