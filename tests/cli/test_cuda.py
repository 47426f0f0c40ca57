"""The CUDA backend where there is no GPU: the true reason is told, and nothing else suffers."""

from __future__ import annotations

import json

import pytest

from vox_core.catalog import load_catalog, objections
from vox_cuda.probe import hardware

NO_DRIVER = "no NVIDIA driver library (libnvidia-ml.so.1 is not there, libcuda.so.1 is not there)"

pytestmark = pytest.mark.skipif(
    hardware()["detail"] != NO_DRIVER, reason="an NVIDIA driver is installed here"
)


def verdicts(told: str) -> dict[str, tuple[str, str]]:
    return {each["id"]: (each["status"], each["reason"]) for each in json.loads(told)["verdicts"]}


def test_explain_gives_the_reason_of_the_probe(vox) -> None:
    told = vox("backend", "explain", "--json").out
    assert verdicts(told)["cuda"] == ("rejected", f"no such hardware: {NO_DRIVER}")


def test_asked_for_by_name_it_is_refused_before_any_work(vox, tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    done = vox("train", "--backend", "cuda", "--data", "x.jsonl")
    assert (done.code, done.out) == (2, "")
    assert "error[VOX-B002]: 'cuda' is unusable for `train`" in done.err
    assert NO_DRIVER in done.err
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == []


def test_training_goes_to_the_cpu_without_being_asked_to(vox) -> None:
    """No GPU lies idle: no word of it in the choice, and no --allow-cpu."""
    done = vox("backend", "explain", "--json")
    told = json.loads(done.out)
    assert told["chosen"] == "cpu"
    assert "NVIDIA" not in told["why"]
    assert "allow-cpu" not in done.out + done.err


def test_it_may_be_installed_before_there_is_a_gpu() -> None:
    entry = load_catalog().plugins["cuda"]
    assert objections(entry, {"cpu"}, {"sys_platform": "linux"}) == []
    assert objections(entry, {"nvidia"}, {"sys_platform": "darwin"}) != []


def test_the_doctor_tells_of_the_gpu_and_of_torch(vox) -> None:
    (examined,) = json.loads(vox("plugin", "doctor", "cuda", "--json").out)
    found = {check["name"]: check for check in examined["checks"]}
    assert found["hardware"]["detail"] == f"no such hardware: {NO_DRIVER}"
    assert "`nvidia-smi` lists the GPU" in found["hardware"]["remedy"]
    assert found["code"]["ok"]
    assert "torch" in found
