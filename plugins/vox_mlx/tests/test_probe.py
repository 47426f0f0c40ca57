"""What the probe says of Macs, of Linux machines and of those it cannot serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vox_mlx
from vox_mlx.probe import hardware

MEMORY = "MemTotal:       24689764 kB\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(MEMORY)
    return tmp_path


def test_apple_silicon():
    sysctl = "machdep.cpu.brand_string: Apple M3 Max\nhw.memsize: 68719476736\n"
    found = hardware("Darwin", "arm64", sysctl, Path("/none"), Path("/none"))
    assert found["present"]
    assert found["devices"] == [
        {"name": "Apple M3 Max", "tag": "apple", "memory_bytes": 68719476736, "best_dtype": "bf16"}
    ]


def test_a_mac_with_an_intel_processor_has_no_hardware():
    found = hardware("Darwin", "x86_64", "", Path("/none"), Path("/none"))
    assert (found["present"], found["devices"]) == (False, [])
    assert "no Apple silicon" in str(found["detail"])


def test_linux_computes_on_the_cpu_and_says_so(root, tmp_path):
    found = hardware("Linux", "x86_64", "", root, tmp_path)
    (device,) = found["devices"]
    assert (device["tag"], device["best_dtype"]) == ("cpu", "fp32")
    assert device["memory_bytes"] == 24689764 * 1024
    assert "on the CPU" in str(found["detail"])


@pytest.mark.parametrize(("package", "driver"), [(True, True), (True, False), (False, True)])
def test_linux_with_mlxs_cuda_package_and_a_driver(root, tmp_path, package, driver):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    if package:
        (packages / "mlx_cuda_13-0.32.4.dist-info").mkdir()
    if driver:
        (root / "dev").mkdir()
        (root / "dev" / "nvidiactl").touch()
    (device,) = hardware("Linux", "x86_64", "", root, packages)["devices"]
    assert device["tag"] == ("nvidia" if package and driver else "cpu")


def test_it_runs_on_the_standard_library_alone():
    script = Path(vox_mlx.__file__).with_name("probe.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", script], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["devices"]
