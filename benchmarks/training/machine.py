"""Describe the machine and the installed versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DISTRIBUTIONS = (
    "vox-ml",
    "vox-ml-torch",
    "torch",
    "transformers",
    "peft",
    "trl",
    "datasets",
    "accelerate",
    "bitsandbytes",
    "flash-attn",
    "mlx",
    "mlx-lm",
)


def describe(device: str, threads: int) -> dict[str, Any]:
    """Processor, threads, system, and the GPU if it is one's turn."""
    about = {"cpu": _processor(), "threads": threads, "system": platform.platform()}
    if device == "cuda":
        import torch

        about["gpu"] = torch.cuda.get_device_name()
    return about


def versions() -> dict[str, str]:
    """Versions of the installed distributions."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """Its name and its bfloat16 instructions, since names of virtual processors say little."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    known = {key.strip(): value.strip() for key, value in fields.items()}
    flags = known.get("flags", "").split()
    kinds = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    name = known.get("model name", platform.processor())
    family = f"family {known['cpu family']} model {known['model']}" if "cpu family" in known else ""
    return " ".join([name, family, *kinds])
