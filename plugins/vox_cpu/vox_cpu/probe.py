"""Describe the processor of this machine: vox's hardware probe.

Run as a script, it prints one JSON object (its shape is in `vox_core.host.probe`). Standard library
only, so that it works where torch is missing or broken. It reads /proc and cgroups on Linux and
sysctl on macOS; unknown facts are None.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The processor flags that decide dtypes and kernels.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "i8mm")

# Either multiplies bfloat16 in hardware. Elsewhere those products are emulated, and float32 is both
# faster and more precise. Arm's `bf16` is reported, but not counted on.
NATIVE_BF16 = {"avx512_bf16", "amx_bf16"}

# Controller of cgroups v1, empty for v2 -> the file of its limit.
MEMORY_LIMITS = {
    "": "memory.max",  # holds "max" where there is no limit
    "memory": "memory.limit_in_bytes",  # a huge number where there is none
}
PROCESSOR_LIMIT = "cpu.max"  # v2: microseconds, or "max", and their period
SYSCTLS = {"hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_I8MM": "i8mm"}


@dataclass(frozen=True)
class Processor:
    """All processors that this process may use, as one device; `cores` counts hardware threads."""

    name: str
    cores: int
    memory_bytes: int | None
    available_bytes: int | None
    features: tuple[str, ...]

    @property
    def best_dtype(self) -> Literal["bf16", "fp32"]:
        """The dtype that `--dtype auto` selects."""
        return "bf16" if NATIVE_BF16 & set(self.features) else "fp32"

    @property
    def summary(self) -> str:
        """A description on one line."""
        reasons = sorted(NATIVE_BF16 & set(self.features))
        parts = [
            f"{self.cores} cores",
            _gigabytes(self.memory_bytes, "memory"),
            _gigabytes(self.available_bytes, "free"),
            f"{self.best_dtype} ({', '.join(reasons)})" if reasons else self.best_dtype,
        ]
        return ", ".join(part for part in parts if part)


def processor() -> Processor:
    """Return this machine's processor."""
    if (system := platform.system()) == "Darwin":
        return _macos(_sysctl(), os.cpu_count() or 1)
    if system == "Linux":
        return _linux(Path("/"), len(os.sched_getaffinity(0)))
    return Processor(platform.machine(), os.cpu_count() or 1, None, None, ())


def hardware(found: Processor) -> dict[str, object]:
    """Return the probe's result."""
    device = {
        "name": found.name,
        "tag": "cpu",
        "memory_bytes": found.memory_bytes,
        "available_bytes": found.available_bytes,
        "best_dtype": found.best_dtype,
        "features": found.features,
    }
    return {"present": True, "devices": [device], "detail": found.summary}


def _linux(root: Path, cores: int) -> Processor:
    """Read the kernel's files under `root`; the limits of a container or of a job
    count as the totals."""
    information = (root / "proc/cpuinfo").read_text()
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.M))
    files = [g / file for v1, file in MEMORY_LIMITS.items() for g in _groups(root, v1)]
    limits = [int(text) for file in files if (text := _text(file)).isdigit()]
    quotas = [_quota(_text(group / PROCESSOR_LIMIT)) for group in _groups(root, "")]
    name = re.search(r"^model name\s*:\s*(.+)$", information, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", information, re.M)
    has = set(flags[1].split()) if flags else set()
    return Processor(
        name=name[1] if name else platform.machine(),
        cores=min(cores, *(quota or cores for quota in quotas)),
        memory_bytes=min([1024 * int(memory["MemTotal"]), *limits]),
        available_bytes=min([1024 * int(memory["MemAvailable"]), *limits]),
        features=tuple(feature for feature in FEATURES if feature in has),
    )


def _groups(root: Path, controller: str) -> list[Path]:
    """List this process's control group and those above it: Slurm and systemd limit a job in its
    own, a container is limited in the topmost that it sees."""
    top = root / "sys/fs/cgroup" / controller
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    own = [Path(path.lstrip("/")) for _, names, path in lines if controller in names.split(",")]
    return [top, *(top / group for path in own for group in (path, *path.parents))]


def _macos(sysctl: str, cores: int) -> Processor:
    """Parse lines of `key: value`; macOS reports no comparable number for available memory."""
    values = dict(re.findall(r"^([\w.]+): (.+)$", sysctl, re.M))
    size = values.get("hw.memsize")
    return Processor(
        name=values.get("machdep.cpu.brand_string", platform.machine()),
        cores=cores,
        memory_bytes=int(size) if size else None,
        available_bytes=None,
        features=tuple(name for key, name in SYSCTLS.items() if values.get(key) == "1"),
    )


def _sysctl() -> str:
    """Call sysctl, ignoring its error for unknown keys; it prints the others."""
    command = ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.memsize", *SYSCTLS]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _quota(limit: str) -> int | None:
    """Parse a limit of processors; a part of one counts as one."""
    quota, _, period = limit.partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdigit() else None


def _text(file: Path) -> str:
    return file.read_text(errors="surrogateescape").strip() if file.is_file() else ""


def _gigabytes(size: int | None, what: str) -> str | None:
    return None if size is None else f"{size / 1e9:.1f} GB {what}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(hardware(processor())))
