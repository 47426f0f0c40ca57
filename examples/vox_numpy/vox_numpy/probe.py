"""The hardware of the backend `numpy`, as vox asks for it before it imports anything.

Run as a script, it prints one JSON object, which docs/guide/write-a-backend.md of vox describes. It
has the standard library only, and 20 seconds at most. Hardware that is not here is an answer:
`present` false, no devices, and in `detail` how that shows. An exception says: installed, but
broken.
"""

from __future__ import annotations

import json
import os
import platform
import sys


def hardware() -> dict[str, object]:
    """The processor. For an accelerator, look for its driver, and give it a tag of its own."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = {"name": platform.machine(), "tag": "cpu", "memory_bytes": size, "best_dtype": "fp32"}
    detail = f"{os.cpu_count()} cores, {size / 1e9:.1f} GB memory"
    return {"present": True, "devices": [device], "detail": detail}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(hardware()))
