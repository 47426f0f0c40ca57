"""Probes as they run: real scripts in real processes; and the probe of the CPU plugin."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from vox_core.errors import ConfigError
from vox_core.host import probe, process
from vox_core.host.discover import Found
from vox_core.host.manifest import Capabilities, Manifest, Probe, Requires, parse_manifest
from vox_core.host.probe import Device, Hardware, ProbeFault, accelerators, probe_all
from vox_core.host.process import Failed, output_of, run

CPU_PLUGIN = Path(__file__).resolve().parents[2] / "plugins/vox_cpu/vox_cpu"

ANSWER = 'print(\'{"present": true, "devices": [{"name": "X1", "tag": "x"}], "detail": "one X1"}\')'
X1 = Hardware(True, (Device("X1", "x"),), "one X1")


def plugin(folder: Path, script: str, requires: Requires | None = None, id: str = "x") -> Found:
    (folder / f"{id}_probe.py").write_text(script)
    manifest = Manifest(
        id=id,
        name=id,
        version="1",
        api="2.0",
        licence="MIT",
        capabilities=Capabilities(("x",), ("none",), ("fp32",), ("lora",), ("*",)),
        requires=requires or Requires(),
        probe=Probe(f"{id}_probe.py"),
    )
    return Found(id, f"dist-{id}", "1", EntryPoint(id, "x:y", "g"), manifest, folder)


def result(found: Found, environ: dict[str, str] | None = None) -> Hardware | ProbeFault:
    return probe_all([found], environ or {})[found.id]


def test_the_answer_is_read(tmp_path: Path) -> None:
    assert result(plugin(tmp_path, ANSWER)) == X1


def test_no_such_hardware_is_an_answer(tmp_path: Path) -> None:
    none = 'print(\'{"present": false, "devices": [], "detail": "no driver"}\')'
    assert result(plugin(tmp_path, none)) == Hardware(False, (), "no driver")


BROKEN = {
    "raises": (
        "import nonsense",
        "its probe failed: ModuleNotFoundError: No module named 'nonsense'",
    ),
    "exits": ("raise SystemExit(3)", "its probe failed: exit 3"),
    "crashes": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "its probe was ended by SIGSEGV",
    ),
    "says nothing": ("", "its probe gave a wrong answer: document: "),
    "says something else": ("print('hello')", "its probe gave a wrong answer: document: "),
    "forgets a field": (
        'print(\'{"present": false, "devices": []}\')',
        "its probe gave a wrong answer: detail: Field required",
    ),
    "contradicts itself": (
        'print(\'{"present": true, "devices": [], "detail": ""}\')',
        "its probe gave a wrong answer: `present` and `devices` disagree",
    ),
    "tells two lines": (
        'print(\'{"present": false, "devices": [], "detail": "no\\\\ndriver"}\')',
        "its probe gave a wrong answer: detail: 'no\\ndriver' is not one line of text",
    ),
    "steers the terminal": (
        ANSWER.replace("X1", "\\\\u001b[2J", 1),
        "its probe gave a wrong answer: devices.0.name: '\\x1b[2J' is not one line of text",
    ),
    "has less than no memory": (
        ANSWER.replace('"tag"', '"memory_bytes": -1, "tag"'),
        "memory_bytes: Input should be greater than or equal to 0 (found: -1)",
    ),
    "needs site-packages": ("import pydantic", "No module named 'pydantic'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_probe_says_why(case: str, tmp_path: Path) -> None:
    script, reason = BROKEN[case]
    fault = result(plugin(tmp_path, script))
    assert isinstance(fault, ProbeFault)
    assert reason in fault.reason


def test_probes_that_hang_are_ended_together_with_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", 4)
    hanging = "import subprocess, sys, time\n" + (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(__file__ + '.pid', 'w').write(str(child.pid)); time.sleep(60)"
    )
    plugins = [plugin(tmp_path, hanging, id=name) for name in ("a", "b", "c")]
    started = time.monotonic()
    results = probe_all([*plugins, plugin(tmp_path, ANSWER)], {})
    assert time.monotonic() - started < 3 * 4  # at once, not one after the other
    assert results["a"] == results["b"] == ProbeFault("its probe did not end in 4 s")
    assert results["x"] == X1
    pid = int((tmp_path / "a_probe.py.pid").read_text())
    assert eventually(lambda: not alive(pid))


def test_a_probe_that_prints_without_end_is_ended(tmp_path: Path) -> None:
    """Long before its time is up, and without keeping what it prints."""
    endless = "while True: print('x' * 1_000_000)"
    assert result(plugin(tmp_path, endless)) == ProbeFault("its probe printed more than 4 MB")


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_of_stderr_the_end_is_kept() -> None:
    ended = run(python("import sys; sys.stderr.write('x' * 10**7 + 'end')"), 20)
    assert len(ended.stderr) == process.ERRORS_BYTES
    assert ended.stderr.endswith(b"xend")
    with pytest.raises(Failed) as caught:
        output_of(python("raise SystemExit('x' * 10**7)"), 20)
    assert len(str(caught.value)) < 1000


def test_one_who_floods_stderr_is_ended_in_time() -> None:
    with pytest.raises(Failed, match="did not end in 1 s"):
        run(python("import sys\nwhile True: sys.stderr.write('x' * 1_000_000)"), 1)


def test_a_process_that_has_closed_its_output_is_ended_in_time() -> None:
    with pytest.raises(Failed):
        run(python("import os, time; os.close(1); os.close(2); time.sleep(60)"), 1)


def alive(pid: int) -> bool:
    """Running; an orphan that nobody has reaped yet is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def test_a_native_library_that_is_missing_makes_the_plugin_broken(tmp_path: Path) -> None:
    fault = result(plugin(tmp_path, ANSWER, Requires(native_libs=("libnonsense.so.9",))))
    assert isinstance(fault, ProbeFault)
    assert "libnonsense.so.9" in fault.reason


def test_nothing_to_probe_is_no_result() -> None:
    assert probe_all([], {}) == {}


# --- the core's own look --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "tags"),
    [("none", []), ("nvidia", ["nvidia"]), ("apple, nvidia", ["nvidia", "apple"])],
)
def test_accelerators_can_be_pretended(value: str, tags: list[str]) -> None:
    assert [each.tag for each in accelerators({"VOX_OVERRIDE_HARDWARE": value})] == tags


def test_unknown_hardware_cannot_be_pretended() -> None:
    with pytest.raises(ConfigError, match="names unknown hardware") as caught:
        accelerators({"VOX_OVERRIDE_HARDWARE": "nvidia,abacus"})
    assert caught.value.found == "abacus"


def test_the_driver_of_nvidia_shows_by_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "nvidiactl"
    monkeypatch.setattr(probe, "_NVIDIA_DRIVER", (device,))
    assert probe.NVIDIA not in accelerators({})
    device.touch()
    assert probe.NVIDIA in accelerators({})
    assert probe.NVIDIA not in accelerators({"CUDA_VISIBLE_DEVICES": ""})


def test_pretended_hardware_replaces_the_probe_of_what_is_tagged(tmp_path: Path) -> None:
    tagged = plugin(tmp_path, "raise SystemExit", Requires(hardware_tag="nvidia"))
    there = result(tagged, {"VOX_OVERRIDE_HARDWARE": "nvidia"})
    assert there == Hardware(
        True, (Device("nvidia", "nvidia"),), "nvidia (VOX_OVERRIDE_HARDWARE=nvidia)"
    )
    absent = result(tagged, {"VOX_OVERRIDE_HARDWARE": "none"})
    assert absent == Hardware(False, (), "no nvidia hardware (VOX_OVERRIDE_HARDWARE=none)")
    untagged = plugin(tmp_path, ANSWER)
    assert result(untagged, {"VOX_OVERRIDE_HARDWARE": "none"}) == X1


# --- the CPU plugin -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_probe", CPU_PLUGIN / "probe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_cpu_plugin_tells_about_this_machine() -> None:
    file = CPU_PLUGIN / "vox_plugin.toml"
    manifest = parse_manifest(file.read_text(), file)
    found = Found("cpu", "vox-ml-cpu", "0.1.0", EntryPoint("cpu", "x:y", "g"), manifest, CPU_PLUGIN)
    hardware = result(found)
    assert isinstance(hardware, Hardware), hardware
    (device,) = hardware.devices
    assert (hardware.present, device.tag) == (True, "cpu")
    assert device.memory_bytes is not None and device.memory_bytes > 1e8
    assert device.best_dtype in manifest.capabilities.dtypes


def linux(root: Path, flags: str, limit: str | None = None, quota: str = "") -> Path:
    files = {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Fast One\nflags\t\t: fpu {flags}\n",
        "proc/meminfo": "MemTotal:       8000000 kB\nMemFree: 1 kB\nMemAvailable:   6000000 kB\n",
    }
    if limit:
        files["sys/fs/cgroup/memory.max"] = limit
    if quota:
        files["sys/fs/cgroup/cpu.max"] = quota
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("avx2", "fp32"),
        ("avx2 avx512f", "fp32"),
        ("avx2 avx512_bf16", "bf16"),
        ("avx2 amx_bf16 amx_tile", "bf16"),
    ],
)
def test_the_best_dtype_follows_the_instruction_set(
    flags: str, dtype: str, tmp_path: Path, cpu_probe: ModuleType
) -> None:
    assert cpu_probe._linux(linux(tmp_path, flags), 4).best_dtype == dtype


def test_linux_memory_is_at_most_what_the_container_allows(
    tmp_path: Path, cpu_probe: ModuleType
) -> None:
    free = cpu_probe._linux(linux(tmp_path, "avx2", "max\n"), 4)
    assert (free.memory_bytes, free.available_bytes) == (8_192_000_000, 6_144_000_000)
    limited = cpu_probe._linux(linux(tmp_path, "avx2", "2000000000\n"), 4)
    assert (limited.memory_bytes, limited.available_bytes) == (2_000_000_000, 2_000_000_000)
    assert limited.summary == "4 cores, 2.0 GB memory, 2.0 GB free, fp32"


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000\n", 2), ("800000 100000\n", 4), ("max 100000\n", 4)]
)
def test_linux_cores_are_at_most_what_the_container_allows(
    quota: str, cores: int, tmp_path: Path, cpu_probe: ModuleType
) -> None:
    assert cpu_probe._linux(linux(tmp_path, "avx2", quota=quota), 4).cores == cores


@pytest.mark.parametrize(
    ("line", "files"),
    [
        pytest.param("0::/slurm/job_1/step_0", ("memory.max", "cpu.max"), id="v2"),
        pytest.param("4:memory:/slurm/job_1/step_0\n0::/", ("memory.limit_in_bytes",), id="v1"),
        pytest.param("9:cpu,memory:/slurm/job_1/step_0", ("memory.limit_in_bytes",), id="joint"),
    ],
)
def test_linux_has_what_a_job_is_allowed_by_a_group_above_its_own(
    line: str, files: tuple[str, ...], tmp_path: Path, cpu_probe: ModuleType
) -> None:
    root = linux(tmp_path, "avx2")
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(f"7:pids:/elsewhere\n{line}\n")
    job = root / "sys/fs/cgroup" / ("memory" * (len(files) == 1)) / "slurm/job_1"
    job.mkdir(parents=True)
    for file, limit in zip(files, ("2000000000\n", "150000 100000\n"), strict=False):
        (job / file).write_text(limit)
    found = cpu_probe._linux(root, 4)
    assert (found.memory_bytes, found.available_bytes) == (2_000_000_000, 2_000_000_000)
    assert found.cores == (2 if "cpu.max" in files else 4)


def test_macos_reports_arm_bf16_and_trains_in_float32(cpu_probe: ModuleType) -> None:
    text = (
        "machdep.cpu.brand_string: Apple M3\nhw.memsize: 17179869184\n"
        "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_I8MM: 0\n"
    )
    found = cpu_probe._macos(text, 8)
    assert (found.name, found.memory_bytes, found.features) == ("Apple M3", 2**34, ("bf16",))
    assert (found.best_dtype, found.available_bytes) == ("fp32", None)
