"""Find the device that MLX would use: vox's hardware probe.

Run as a script, it prints one JSON object (its shape is in `vox_core.host.probe`). Standard library
only, so that it works where MLX is missing or broken. On a Mac the device is the GPU of Apple
silicon, by sysctl; on Linux the processor, or an NVIDIA GPU where MLX's CUDA package is installed.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

NVIDIA_DRIVER = "dev/nvidiactl"


def hardware(
    system: str, machine: str, sysctl: str, root: Path, packages: Path
) -> dict[str, object]:
    """Return the probe's result.

    Args:
        sysctl: lines of `key: value`, on macOS.
        root: `/`, on Linux.
        packages: the folder of the environment's packages.
    """
    if system == "Darwin":
        return _mac(machine, dict(re.findall(r"^([\w.]+): (.+)$", sysctl, re.M)))
    if any(packages.glob("mlx_cuda*.dist-info")) and (root / NVIDIA_DRIVER).exists():
        return _found({"name": "NVIDIA GPU", "tag": "nvidia", "best_dtype": "bf16"}, "NVIDIA GPU")
    memory = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.M)
    size = 1024 * int(memory[1]) if memory else None
    # bfloat16 products are a scalar loop there.
    device = {"name": machine, "tag": "cpu", "memory_bytes": size, "best_dtype": "fp32"}
    return _found(device, f"no GPU that MLX can use: it computes on the CPU, {_gigabytes(size)}")


def _mac(machine: str, values: dict[str, str]) -> dict[str, object]:
    if machine != "arm64":
        return {"present": False, "devices": [], "detail": f"no Apple silicon: {machine}"}
    name = values.get("machdep.cpu.brand_string", "Apple silicon")
    size = int(values["hw.memsize"]) if "hw.memsize" in values else None
    device = {"name": name, "tag": "apple", "memory_bytes": size, "best_dtype": "bf16"}
    return _found(device, f"{name}, {_gigabytes(size)}, shared with the GPU")


def _found(device: dict[str, object], detail: str) -> dict[str, object]:
    return {"present": True, "devices": [device], "detail": detail}


def _sysctl() -> str:
    """Call sysctl, ignoring its error for unknown keys; it prints the others."""
    command = ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.memsize"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _gigabytes(size: int | None) -> str:
    return "memory unknown" if size is None else f"{size / 1e9:.1f} GB memory"


def _packages() -> Path:
    """Return the environment's site-packages, which the probe runs without."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(sys.executable).parents[1] / "lib" / version / "site-packages"


if __name__ == "__main__":
    system = platform.system()
    sysctl = _sysctl() if system == "Darwin" else ""
    found = hardware(system, platform.machine(), sysctl, Path("/"), _packages())
    sys.stdout.write(json.dumps(found))
