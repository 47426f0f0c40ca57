"""What is refused before any work, and what the doctor says of it."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vox_core.contract import Check, LoadJob
from vox_core.errors import BackendError
from vox_cuda import backend, ready
from vox_cuda.ready import has_code_for, require_bitsandbytes, require_cuda, torch_build
from vox_torch.libraries import import_bitsandbytes
from vox_torch.loss import HeadLoss

HOOKS = [backend.vox_train, backend.vox_merge, backend.vox_load]


@pytest.fixture(autouse=True)
def _order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # put back afterwards, whoever sets it


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Have torch built for that CUDA, or without any."""

    def stands_for(cuda: str | None) -> None:
        monkeypatch.setattr(ready, "torch_build", lambda: ("2.13.0+x", cuda))

    return stands_for


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, built: Callable[[str | None], None]) -> None:
    """A GPU that torch reaches, as far as it is asked here."""
    built("12.8")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")


def refusal(call: Callable[[], object]) -> BackendError:
    with pytest.raises(BackendError) as caught:
        call()
    assert caught.value.code == "VOX-B004"
    return caught.value


def checks() -> dict[str, Check]:
    return {check.name: check for check in ready.checks()}


# --- torch ----------------------------------------------------------------------------------------


def test_what_torch_was_built_with_is_what_it_says_itself():
    assert torch_build() == (torch.__version__, torch.version.cuda)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_torch_without_cuda_is_refused_before_any_work(hook, built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", pytest.fail)
    built(None)
    error = refusal(lambda: hook(None, None))  # neither the job nor the context is looked at
    assert (error.what, error.where) == ("torch is built without CUDA", "torch 2.13.0+x")
    assert "pip install torch==2.13.0 --index-url https://download.pytorch.org" in error.remedy


def test_a_gpu_that_torch_does_not_reach(gpu, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nx")

    monkeypatch.setattr(torch.cuda, "init", init)
    error = refusal(require_cuda)
    assert error.what == "torch does not reach the GPU"
    assert error.found == "The NVIDIA driver on your system is too old (found version 11040)."


def test_a_torch_without_code_for_the_gpu(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    error = refusal(require_cuda)
    assert (error.found, error.expected) == (
        "a GPU of compute capability 6.1",
        "one that it is built for: sm_80, sm_90",
    )


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((7, 5), ["compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((12, 1), ["sm_120"], True),
        ((12, 0), ["compute_90a"], False),
        ((9, 0), [], False),
        ((9, 0), ["gfx90a"], False),
    ],
)
def test_which_builds_run_on_which_gpus(capability, built_for, runs):
    assert has_code_for(capability, built_for) is runs


def test_gpus_are_numbered_as_the_probe_numbers_them(gpu, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ["CUDA_DEVICE_ORDER"]))
    seen: list[str] = []
    require_cuda()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    require_cuda()
    assert seen == ["PCI_BUS_ID", "FASTEST_FIRST"]


def test_a_model_is_loaded_without_attention_that_plans(gpu, monkeypatch):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        enabled = lambda *_: torch.backends.cuda.cudnn_sdp_enabled()  # noqa: E731
        monkeypatch.setattr(backend, "_engine", SimpleNamespace(load=enabled))
        assert backend.vox_load(LoadJob(Path(), "bf16"), None) is False
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_memory_of_logits_is_that_of_a_chunk_on_a_gpu():
    manifest = tomllib.loads(Path(ready.__file__).with_name("vox_plugin.toml").read_text())
    chunk = HeadLoss(lambda hidden_1CH: hidden_1CH, vocabulary=1, device="cuda")._chunk
    assert manifest["memory"]["logits-elements"] == chunk


# --- the doctor -----------------------------------------------------------------------------------


def test_the_doctor_of_a_torch_without_cuda(built):
    built(None)
    found = checks()
    assert list(found) == ["torch"]
    assert not found["torch"].ok
    assert found["torch"].detail == "torch 2.13.0+x is built without CUDA"
    assert "pip uninstall torch" in str(found["torch"].remedy)


def test_the_doctor_of_a_gpu(gpu):
    found = checks()
    assert found["torch"] == Check("torch", True, "torch 2.13.0+x, built for CUDA 12.8")
    assert found["device"] == Check("device", True, "torch computes on H200 (sm_90)")


def test_the_doctor_of_a_gpu_that_torch_does_not_reach(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    found = checks()["device"]
    assert not found.ok
    assert found.detail == (
        "torch is built without code for this GPU: a GPU of compute capability 9.0"
    )


@pytest.mark.parametrize("with_cuda", [True, False])
def test_the_doctor_of_bitsandbytes(gpu, monkeypatch, with_cuda):
    bitsandbytes = import_bitsandbytes()
    from bitsandbytes import cextension

    monkeypatch.setattr(type(cextension.lib), "compiled_with_cuda", with_cuda)
    found = checks()["bitsandbytes"]
    assert found.ok is with_cuda
    how = "with its CUDA library" if with_cuda else "did not load its CUDA library"
    assert found.detail == f"bitsandbytes {bitsandbytes.__version__} {how}"


def test_the_doctor_of_a_bitsandbytes_that_cannot_be_imported(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = checks()["bitsandbytes"]
    assert not found.ok
    assert found.detail.startswith("cannot be imported: ModuleNotFoundError: ")


@pytest.mark.parametrize(("quant", "optimizer"), [("nf4", "adamw"), ("none", "adamw-8bit")])
def test_what_bitsandbytes_cannot_do_here_is_refused(gpu, monkeypatch, quant, optimizer):
    import_bitsandbytes()
    from bitsandbytes import cextension

    monkeypatch.setattr(cextension.lib, "compiled_with_cuda", True, raising=False)
    require_bitsandbytes(quant, optimizer)
    monkeypatch.setattr(cextension.lib, "compiled_with_cuda", False, raising=False)
    error = refusal(lambda: require_bitsandbytes(quant, optimizer))
    assert "did not load its CUDA library" in error.found
    assert "python -m bitsandbytes" in error.remedy


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_bitsandbytes_is_not_asked_for_what_torch_does(monkeypatch, quant):
    asked = []
    monkeypatch.setattr(ready, "bitsandbytes", lambda: asked.append(quant))
    require_bitsandbytes(quant)
    assert asked == []
