"""`vox --help` imports only what printing help needs.

Checked by what Python says it imported, never by the clock; benchmarks/startup.py measures time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "gguf",
    "huggingface_hub",
    "ml_dtypes",
    "numpy",
    "pluggy",
    "pydantic",
    "rich",
    "safetensors",
    "torch",
    "transformers",
}
PLUGINS = {"vox_cpu", "vox_torch"}


def test_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "vox_core.cli", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    imported, said = read_importtime(done.stderr)
    assert done.returncode == 0, "\n".join(said)
    assert said == []
    assert "Usage: vox" in done.stdout
    assert {"click", "vox_core"} <= imported, "the report of -X importtime was not understood"
    assert imported & (HEAVY | PLUGINS) == set()


def read_importtime(stderr: str) -> tuple[set[str], list[str]]:
    """Top-level names out of lines such as `import time: 123 | 456 | click.core`; other lines."""
    lines = stderr.splitlines()
    reports = [line for line in lines if line.startswith("import time:")]
    names = {report.rsplit("|", 1)[1].strip().split(".")[0] for report in reports}
    return names, [line for line in lines if line not in reports]
