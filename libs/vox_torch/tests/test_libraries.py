"""What oneDNN keeps of shapes that it met does not grow for ever."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from vox_torch.libraries import bound_primitives

# Live bytes of the C library's heap before and after 100 products of shapes never seen before.
_MULTIPLY = """
import ctypes
import torch
from vox_torch.libraries import bound_primitives

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
bound_primitives()
weight = torch.ones(64, 64, dtype=torch.bfloat16)

def multiply(lengths):
    for length in lengths:
        torch.ones(length, 64, dtype=torch.bfloat16) @ weight

multiply(range(64, 594))
before = info().uordblks
multiply(range(594, 694))
print(info().uordblks - before)
"""


def grown() -> int:
    unset = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", _MULTIPLY]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc, whose heap is looked at")
def test_memory_does_not_grow_with_every_new_length():
    # Seen: 0.1 MB, and 56 MB without a bound. Where oneDNN does not multiply, it does not grow.
    assert grown() < 2**24


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "")  # so that it is put back afterwards
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    bound_primitives()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    assert os.environ["LRU_CACHE_CAPACITY"]


_LOAD = """
import os, sys
from pathlib import Path
import numpy as np
from vox_core.contract import LoadJob
from vox_torch.load import load
from vox_torch.profile import DeviceProfile
os.environ["LOCAL_KERNELS"] = "the user's"
load(LoadJob(Path(sys.argv[1]), "fp32"), DeviceProfile("cpu")).logits(np.arange(4))
assert "bitsandbytes" in sys.modules
print(os.environ["LOCAL_KERNELS"], os.environ.get("TORCHDYNAMO_DISABLE"))
print("torch._inductor.compile_fx" in sys.modules)
"""

_KERNELS = """
import os
def get_kernel(name, version):
    if os.environ.get("LOCAL_KERNELS") != f"{name}={os.devnull}":
        print("downloading", name)
    raise FileNotFoundError(os.devnull)
"""


def test_bitsandbytes_is_imported_without_download_warning_or_inductor(tiny, tmp_path):
    """CPUs without bfloat16 ask the package `kernels` for nothing."""
    (tmp_path / "kernels.py").write_text(_KERNELS)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environ.pop("TORCHDYNAMO_DISABLE", None)
    command = [sys.executable, "-c", _LOAD, str(tiny("llama"))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("the user's None\nFalse\n", "")
