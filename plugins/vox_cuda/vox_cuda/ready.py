"""Check that the installed torch and bitsandbytes can compute on the GPU that the probe found.

The probe cannot check this: it runs without site-packages, and importing torch takes longer than
its time limit. So each operation checks it first, in the order of cost.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from vox_core.contract import Check, Optimizer, Quant
from vox_core.errors import BackendError
from vox_torch.libraries import import_bitsandbytes

ORDER = "CUDA_DEVICE_ORDER"
_ITS_OWN: tuple[Quant, ...] = ("nf4", "nf4-embeddings", "nf4-single")
WHEELS = "https://download.pytorch.org/whl/cuXXX"


def require_cuda() -> None:
    """Check that torch was built with CUDA, reaches the GPU, and has code for it.

    Raises:
        BackendError: B004; one of these fails.
    """
    same_order()
    version, cuda = torch_build()
    if cuda is None:
        raise without_cuda(version)
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        _unreachable(version, error)
    capability, built_for = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if not has_code_for(capability, built_for):
        raise _without_code(version, capability, built_for)


def same_order() -> None:
    """Make CUDA number GPUs by PCI bus, as the probe does, instead of by speed.

    Call before CUDA is initialised. If the user set another order, the probe uses that, too.
    """
    os.environ.setdefault(ORDER, "PCI_BUS_ID")


def without_plans() -> None:
    """Keep torch's attention to its own kernels, for the rest of this process.

    It prefers cuDNN's on newer GPUs, which plan each new length anew, in 40 ms forward and 40 ms
    backward. Lengths of documents and of prompts are new all the time.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)  # type: ignore[no-untyped-call]


def torch_build() -> tuple[str, str | None]:
    """Return torch's version and its CUDA version; None for a build without CUDA.

    torch stores both in a file of assignments, which is executed alone in a millisecond; importing
    torch takes seconds. The suffix `+cpu` of a version is not enough: wheels for some platforms,
    and own builds, lack it.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "the manifest requires torch"
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return str(facts["__version__"]), facts.get("cuda")


def has_code_for(capability: tuple[int, int], built_for: Iterable[str]) -> bool:
    """Whether a build for `sm_80`, `sm_90a`, `compute_90`, … runs on a GPU of `capability`.

    Binary code runs on its own major version from its own minor on; a letter at the end binds it to
    exactly its own. `compute_…` is compiled on the spot for what is newer. (CUDA C++ Programming
    Guide, Compute Capabilities; as torch counts them, (9, 0) is 90.)
    """
    here = 10 * capability[0] + capability[1]
    for build in built_for:
        if not (parts := re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", build)):
            continue
        kind, number, bound = parts[1], int(parts[2]), bool(parts[3])
        if here == number:
            return True
        if here > number and not bound and (kind == "compute" or here // 10 == number // 10):
            return True
    return False


def with_cuda(version: str) -> str:
    """Return the command that installs the same torch with CUDA, since pip keeps an equal
    version."""
    release = version.partition("+")[0]
    return (
        f"install it with CUDA: pip uninstall torch, then pip install torch=={release} "
        f"--index-url {WHEELS}, where cuXXX is cu126 for CUDA 12.6, and no newer than the CUDA "
        "version that `nvidia-smi` shows"
    )


def without_cuda(version: str) -> BackendError:
    return BackendError(
        "B004",
        "torch is built without CUDA",
        where=f"torch {version}",
        found="no CUDA version in torch.version",
        expected="a build of torch for CUDA",
        remedy=with_cuda(version),
    )


def _unreachable(version: str, error: Exception) -> NoReturn:
    raise BackendError(
        "B004",
        "torch does not reach the GPU",
        where=f"torch {version}",
        found=str(error).partition("\n")[0],
        expected="a GPU that CUDA can be initialised on",
        remedy="`vox plugin doctor cuda` shows driver and versions; a driver that is older than "
        "torch's CUDA is to be upgraded, or torch installed for an older CUDA",
    ) from error


def _without_code(
    version: str, capability: tuple[int, int], built_for: Iterable[str]
) -> BackendError:
    return BackendError(
        "B004",
        "torch is built without code for this GPU",
        where=f"torch {version}",
        found=f"a GPU of compute capability {capability[0]}.{capability[1]}",
        expected=f"one that it is built for: {', '.join(built_for)}",
        remedy=f"install a torch that has it: --index-url {WHEELS}, an older CUDA for an older GPU",
    )


def require_bitsandbytes(quant: Quant, optimizer: Optimizer = "adamw") -> None:
    """Check that bitsandbytes supports the requested formats, before a model is loaded.

    Raises:
        BackendError: B004, it has no library for torch's CUDA.
    """
    if quant not in _ITS_OWN and optimizer == "adamw":
        return
    found = bitsandbytes()
    if not found.ok:
        raise BackendError(
            "B004",
            "bitsandbytes cannot compute on the GPU",
            where=f"quantisation {quant}, optimizer {optimizer}",
            found=found.detail,
            expected="its library for the CUDA that torch was built with",
            remedy=found.remedy,
        )


def bitsandbytes() -> Check:
    """Whether bitsandbytes loaded its library for torch's CUDA version."""
    try:
        version = import_bitsandbytes().__version__
        from bitsandbytes.cextension import lib
    except Exception as error:  # noqa: BLE001 - its import searches libraries
        return Check(
            "bitsandbytes",
            False,
            f"cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "install it again: pip install --force-reinstall --no-deps bitsandbytes",
        )
    named = f"bitsandbytes {version}"
    if lib.compiled_with_cuda:
        return Check("bitsandbytes", True, f"{named} with its CUDA library")
    return Check(
        "bitsandbytes",
        False,
        f"{named} did not load its CUDA library",
        "it takes the one for torch's CUDA once torch reaches the GPU; `python -m bitsandbytes` "
        "tells more",
    )


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
