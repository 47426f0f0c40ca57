"""Check torch, the GPU and bitsandbytes, with a remedy for each fault."""

from __future__ import annotations

from collections.abc import Iterator

from vox_core.contract import Check
from vox_core.errors import BackendError
from vox_cuda.library import bitsandbytes
from vox_cuda.ready import require_cuda, torch_build, with_cuda


def checks() -> Iterator[Check]:
    """Check torch first; without CUDA the rest is skipped, as bitsandbytes depends on torch's
    CUDA."""
    version, cuda = torch_build()
    if cuda is None:
        yield Check("torch", False, f"torch {version} is built without CUDA", with_cuda(version))
        return
    yield Check("torch", True, f"torch {version}, built for CUDA {cuda}")
    yield _device()
    yield bitsandbytes()


def _device() -> Check:
    try:
        require_cuda()
    except BackendError as error:
        return Check("device", False, f"{error.what}: {error.found}", error.remedy)
    import torch

    major, minor = torch.cuda.get_device_capability()
    return Check(
        "device", True, f"torch computes on {torch.cuda.get_device_name()} (sm_{major}{minor})"
    )
