"""Cases of selection where an accelerator would lie idle, for the table in test_host_select.py."""

from __future__ import annotations

from dataclasses import replace

from tests.core.select_samples import (
    CPU,
    CUDA,
    CUDA_ABSENT,
    MLX,
    MLX_CPU,
    NEEDS_NVIDIA,
    Case,
    backend,
    broken,
    here,
)
from vox_core.host import Request
from vox_core.host.blocked import COMMAND
from vox_core.host.manifest import Requires
from vox_core.host.probe import APPLE, NVIDIA, ProbeFault

IDLE = {
    # missing, or not to be had
    "GPU without its plugin": Case(
        [CPU], "B007", "'cuda' is not installed", accelerators=(NVIDIA,)
    ),
    "Mac without its plugin": Case([CPU], "B007", "vox plugin install mlx", accelerators=(APPLE,)),
    "GPU that no known backend serves": Case(
        [CPU],
        "cpu",
        "the only usable backend; an NVIDIA GPU is here and stays idle: vox knows no plugin for it",
        accelerators=(NVIDIA,),
        known={},
    ),
    "GPU, plugin broken": Case(
        [CPU, broken("cuda")], "B007", "'cuda' is broken", accelerators=(NVIDIA,)
    ),
    "GPU, probe broken": Case(
        [CPU, replace(CUDA, hardware=ProbeFault("it hung"))],
        "B007",
        "'cuda' is broken (it hung)",
        accelerators=(NVIDIA,),
    ),
    "GPU, plugin too new": Case(
        [CPU, backend("cuda", None, api="3.0")],
        "B007",
        "'cuda' is rejected (api: written for 3.0",
        accelerators=(NVIDIA,),
    ),
    "GPU idle, allowed": Case(
        [CPU],
        "cpu",
        "an NVIDIA GPU is here, but its backend 'cuda' is not installed",
        Request("train", allow_cpu=True),
        (NVIDIA,),
    ),
    "GPU idle, but not for training": Case(
        [CPU], "cpu", "an NVIDIA GPU is here", Request("merge"), (NVIDIA,)
    ),
    # the user's own will
    "GPU idle, plugin blocked": Case(
        [CPU, CUDA],
        "cpu",
        "an NVIDIA GPU is here, but its backend 'cuda' is rejected (blocked by vox.toml)",
        accelerators=(NVIDIA,),
        blocked={"cuda": "vox.toml"},
    ),
    "GPU idle, plugin disabled": Case(
        [CPU, CUDA],
        "cpu",
        "'cuda' is rejected (disabled; to use it again: vox plugin enable cuda)",
        accelerators=(NVIDIA,),
        blocked={"cuda": COMMAND},
    ),
    "GPU idle, plugin blocked and not installed": Case(
        [CPU],
        "cpu",
        "'cuda' is not installed (blocked by vox.toml)",
        accelerators=(NVIDIA,),
        blocked={"cuda": "vox.toml"},
    ),
    # what the contract asks for
    "GPU idle, plugin cannot": Case(
        [MLX_CPU, CUDA],
        "mlx",
        "an NVIDIA GPU is here, but its backend 'cuda' is rejected (capability: quantisation "
        "affine4 (has: none, nf4))",
        Request("train", quant="affine4"),
        (NVIDIA,),
    ),
    "GPU idle, one cannot and one is broken": Case(
        [
            replace(MLX_CPU, hardware=here("cpu")),
            CUDA,
            backend("other", ProbeFault("it hung"), quants=("affine4",), requires=NEEDS_NVIDIA),
        ],
        "B007",
        "'other' is broken (it hung)",
        Request("train", quant="affine4"),
        (NVIDIA,),
    ),
    # a driver at fault
    "GPU seen by the core, not by the probe": Case(
        [CPU, CUDA_ABSENT],
        "B007",
        "an NVIDIA GPU is here, but its backend 'cuda' cannot use it (no NVIDIA driver found "
        "(libcuda.so.1))",
        accelerators=(NVIDIA,),
    ),
    "GPU seen by the core, not by the probe, and what to look at": Case(
        [CPU, CUDA_ABSENT], "B007", "`nvidia-smi` lists the GPU", accelerators=(NVIDIA,)
    ),
    "GPU seen by the core, not by the probe, allowed": Case(
        [CPU, CUDA_ABSENT],
        "cpu",
        "cannot use it (no NVIDIA driver found (libcuda.so.1))",
        Request("train", allow_cpu=True),
        (NVIDIA,),
    ),
    "GPU seen by the core, not by the probe, for merging": Case(
        [CPU, CUDA_ABSENT], "cpu", "'cuda' cannot use it", Request("merge"), (NVIDIA,)
    ),
    "Mac whose backend found the CPU alone": Case(
        [MLX_CPU], "B007", "its backend 'mlx' cannot use it (one cpu)", accelerators=(APPLE,)
    ),
    "Mac in full": Case([CPU, MLX], "mlx", "an accelerator", accelerators=(APPLE,)),
    # the remedy fits the cause
    "GPU, plugin of another system": Case(
        [CPU, backend("cuda", None, requires=Requires(os=("windows",)))],
        "B007",
        "next: install a plugin for this machine",
        accelerators=(NVIDIA,),
    ),
    "GPU, plugin too new, upgrade vox": Case(
        [CPU, backend("cuda", None, api="3.0")],
        "B007",
        "next: upgrade vox-ml; or train on the CPU",
        accelerators=(NVIDIA,),
    ),
    "GPU, plugin too old, upgrade it": Case(
        [CPU, backend("cuda", None, api="0.9")],
        "B007",
        "next: vox plugin upgrade cuda; or train on the CPU",
        accelerators=(NVIDIA,),
    ),
    "GPU driven by a third party": Case(
        [CPU, backend("other", here("nvidia"), requires=NEEDS_NVIDIA)],
        "other",
        "an accelerator",
        accelerators=(NVIDIA,),
    ),
}
