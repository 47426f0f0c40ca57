"""The BLAS that is loaded before MLX, what the doctor says of it, and memory that is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX brings no BLAS on macOS")
LOOK = """
from vox_mlx import backend
from vox_core.errors import VoxError
try:
    for check in backend.vox_doctor():
        print(check.name, check.ok, check.detail)
except VoxError as error:
    print(error.code, error.found)
"""


def look(monkeypatch, blas: str | None) -> str:
    if blas is None:
        monkeypatch.delenv("VOX_MLX_BLAS", raising=False)
    else:
        monkeypatch.setenv("VOX_MLX_BLAS", blas)
    return subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True
    ).stdout


def test_the_doctor_names_the_device(monkeypatch):
    said = look(monkeypatch, None)
    assert said.startswith("device True MLX ")
    assert "CPU" in said or "GPU" in said


@linux
def test_without_one_the_doctor_says_how_slow_it_is(monkeypatch):
    said = look(monkeypatch, "none")
    assert "blas False" in said
    assert "about 70 times slower" in said


@pytest.mark.parametrize("operation", ["vox_load", "vox_train"])
def test_without_one_every_run_begins_with_a_warning(monkeypatch, operation):
    from vox_mlx import backend

    monkeypatch.setattr("vox_mlx.slow", lambda: "it is slow")
    context = Mock()
    with pytest.raises(AttributeError):  # there is no job
        getattr(backend, operation)(job=None, context=context)
    (notice,) = (call.args[0] for call in context.emit.call_args_list)
    assert (notice.level, notice.message[:10]) == ("warning", "it is slow")
    assert "apt install" in notice.message


@linux
def test_one_that_cannot_be_loaded_is_told(monkeypatch):
    assert look(monkeypatch, "/nowhere/lib.so").startswith("VOX-C002 /nowhere/lib.so")


@linux
def test_the_one_that_is_named_is_used(monkeypatch, tmp_path):
    import shutil

    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler"
    source, library = tmp_path / "own.c", tmp_path / "libown.so"
    source.write_text("void cblas_sgemm(void) {}")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    assert f"matrix products by {library}" in look(monkeypatch, str(library))


@linux
def test_vox_doctor_tells_the_users_own_setting_from_a_fault_of_the_authors(monkeypatch):
    monkeypatch.setenv("VOX_MLX_BLAS", "/nowhere/lib.so")
    command = [sys.executable, "-m", "vox_core.cli", "plugin", "doctor", "mlx"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "next: correct VOX_MLX_BLAS, or unset it" in done.stdout.replace("next:  ", "next: ")
    assert "authors" not in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of glibc")
def test_memory_stays_with_the_process_unless_the_user_has_a_say():
    """Page faults of a block of 64 MB that is freed and taken ten times."""
    code = """
import ctypes, resource
from vox_mlx.blas import keep_memory
keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environ = {k: v for k, v in os.environ.items() if k[:7] not in ("MALLOC_", "GLIBC_T")}

    def faults(**said: str) -> int:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env={**environ, **said}, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert 3 * faults() < faults(MALLOC_TRIM_THRESHOLD_="131072")
