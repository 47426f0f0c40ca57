"""What the probe says of GPUs, and of their absence in each of its forms.

No GPU is needed: libraries compiled here stand in for NVIDIA's, with the functions that the probe
calls (driver/), and are loaded as those would be. They answer what `FAKE_…` variables tell them.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vox_core.host import Request, Seen
from vox_cuda import probe
from vox_cuda.probe import visible

SCRIPT = Path(probe.__file__)
SOURCES = Path(__file__).with_name("driver")
GB = 10**9
OLD, PASCAL, TURING, HOPPER = (
    "Old,5,2,8,7,",
    "P100,6,0,16,15,",
    "T4,7,5,16,15,",
    "H200,9,0,141,140,",
)

Ask = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backend is for Linux")


def there(name: str) -> bool:
    """Whether this machine has a driver of its own, which would answer where none is meant to."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return any(Path(folder + name).exists() for folder in probe.FOLDERS if folder)
    return True


without_driver = pytest.mark.skipif(
    there(probe.NVML) or there(probe.CUDA), reason="an NVIDIA driver is installed here"
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both stand-ins."""
    folder = tmp_path_factory.mktemp("driver")
    for name, source in ((probe.NVML, "nvml.c"), (probe.CUDA, "cuda.c")):
        subprocess.run(
            ["cc", "-shared", "-fPIC", SOURCES / source, "-o", folder / name], check=True
        )
    return folder


@pytest.fixture
def ask(libraries: Path, tmp_path: Path) -> Ask:
    """`ask("H200,9,0,141,140,", FAKE_…="…", only=probe.CUDA)` -> what the script prints."""

    def run(*cards: str, only: str | None = None, **variables: str) -> dict[str, Any]:
        for name in (probe.NVML, probe.CUDA):
            if only in (None, name):
                (tmp_path / name).symlink_to(libraries / name)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        told = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_CARDS": ";".join(cards)}
        done = subprocess.run(
            [sys.executable, "-I", "-S", SCRIPT],
            env=kept | told | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        assert answer["present"] == bool(answer["devices"])
        return answer

    return run


def names(answer: dict[str, Any]) -> list[str]:
    return [device["name"] for device in answer["devices"]]


# --- GPUs -----------------------------------------------------------------------------------------


def test_two_gpus(ask: Ask) -> None:
    found = ask(HOPPER, TURING)
    first, second = found["devices"]
    assert first == {
        "name": "H200",
        "tag": "nvidia",
        "memory_bytes": 141 * GB,
        "available_bytes": 140 * GB,
        "best_dtype": "bf16",
        "features": ["sm_90"],
    }
    assert (second["name"], second["best_dtype"], second["features"]) == ("T4", "fp16", ["sm_75"])
    assert found["detail"] == (
        "H200 (sm_90), 141.0 GB memory, 140.0 GB free, bf16, driver 570.12; 1 more, not used"
    )


def test_memory_that_nvml_does_not_tell(ask: Ask) -> None:
    (device,) = ask("GB10,12,1,0,0,s")["devices"]
    assert (device["memory_bytes"], device["available_bytes"]) == (None, None)
    assert device["features"] == ["sm_121"]


def test_a_gpu_of_another_container_is_not_counted(ask: Ask) -> None:
    found = ask(TURING + "p", HOPPER, CUDA_VISIBLE_DEVICES="0")
    assert names(found) == ["H200"]


@pytest.mark.parametrize(
    ("card", "present"), [(OLD, False), (PASCAL, True)], ids=["too old", "old enough"]
)
def test_the_oldest_that_bitsandbytes_takes(ask: Ask, card: str, present: bool) -> None:
    found = ask(card)
    assert found["present"] is present
    told = "Old has compute capability 5.2, and bitsandbytes needs 6.0 or newer"
    assert (found["detail"] == told) is not present


def test_the_first_decides_and_a_better_one_is_named(ask: Ask) -> None:
    found = ask(OLD, HOPPER)
    assert not found["present"]
    assert found["detail"].endswith("; H200 would do, if CUDA_VISIBLE_DEVICES named it first")


def test_the_better_one_named_first(ask: Ask) -> None:
    assert names(ask(OLD, HOPPER, CUDA_VISIBLE_DEVICES="1,0")) == ["H200", "Old"]


# --- which are visible ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 2x", [1, 2]),
        ("1,7,0", [1]),
        ("1,-1,0", [1]),
        ("1,1", []),
        ("7", []),
        ("-1", []),
        ("", []),
        ("GPU-b", [1]),
        ("GPU-c1,GPU-a0", [2, 0]),
        ("GPU-b,0", [1]),
        ("1,GPU-a0", [1]),
        ("GPU-", []),
        ("GPU-z", []),
    ],
)
def test_visible_devices_are_those_of_torch(
    said: str | None, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch knows neither their number nor their UUIDs: the list ends where one names none."""
    uuids = ["GPU-a0", "GPU-b0", "GPU-c1"]
    assert visible(said, uuids) == numbers
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    by_torch = []
    for entry in torch.cuda._parse_visible_devices():
        fitting = [number for number, uuid in enumerate(uuids) if uuid.startswith(str(entry))]
        fitting = fitting if isinstance(entry, str) else [entry]
        if len(fitting) != 1 or fitting[0] >= len(uuids):
            break
        by_torch += fitting
    assert by_torch == numbers


def test_the_first_visible_comes_first(ask: Ask) -> None:
    assert names(ask(HOPPER, TURING, CUDA_VISIBLE_DEVICES="1,0")) == ["T4", "H200"]


def test_by_uuid(ask: Ask) -> None:
    assert names(ask(HOPPER, TURING, CUDA_VISIBLE_DEVICES="GPU-10aa")) == ["T4"]


@pytest.mark.parametrize("said", ["", "-1"])
def test_all_hidden(ask: Ask, said: str) -> None:
    found = ask(HOPPER, CUDA_VISIBLE_DEVICES=said)
    assert found["detail"] == f"CUDA_VISIBLE_DEVICES={said!r} hides every GPU"


def test_none_named(ask: Ask) -> None:
    found = ask(HOPPER, TURING, CUDA_VISIBLE_DEVICES="2")
    assert found["detail"] == "CUDA_VISIBLE_DEVICES='2' names none of the 2 GPUs here"


# --- what does not work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [("18", "Driver/library version mismatch (18)"), ("9", "Driver Not Loaded (9)")],
)
def test_a_driver_that_does_not_work(ask: Ask, status: str, words: str) -> None:
    found = ask(HOPPER, FAKE_NVML_INIT=status)
    assert found["detail"] == f"the NVIDIA driver is here and does not work: nvmlInit_v2: {words}"


def test_a_driver_without_a_gpu(ask: Ask) -> None:
    assert ask()["detail"] == "the NVIDIA driver is here, and no GPU"


@without_driver
def test_nothing_there(ask: Ask) -> None:
    assert ask(only="none")["detail"] == (
        "no NVIDIA driver library (libnvidia-ml.so.1 is not there, libcuda.so.1 is not there)"
    )


@without_driver
def test_a_container_that_may_look_and_not_compute(ask: Ask) -> None:
    assert ask(HOPPER, only=probe.NVML)["detail"] == (
        "no NVIDIA driver library (libcuda.so.1 is not there, though libnvidia-ml.so.1 is)"
    )


def test_a_library_that_cannot_be_loaded(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / probe.CUDA).write_text("no library")
    detail = ask(HOPPER, only=probe.NVML)["detail"]
    assert "libcuda.so.1 cannot be loaded (" in detail and "file too short" in detail


# --- without NVML, or beyond it -------------------------------------------------------------------


@without_driver
def test_cuda_is_asked_where_nvml_is_missing(ask: Ask) -> None:
    found = ask(only=probe.CUDA, FAKE_CUDA_CARDS=HOPPER)
    (device,) = found["devices"]
    assert device["name"] == "H200 by PCI_BUS_ID"
    assert (device["memory_bytes"], device["available_bytes"]) == (141 * GB, None)
    assert (device["best_dtype"], device["features"]) == ("bf16", ["sm_90"])
    assert found["detail"].endswith("(sm_90), 141.0 GB memory, bf16, driver for CUDA 12.8")


@without_driver
@pytest.mark.parametrize(
    ("status", "words"),
    [("100", "no CUDA-capable device is detected (100)"), ("7", "an error of its own (7)")],
)
def test_cuda_that_cannot_be_initialised(ask: Ask, status: str, words: str) -> None:
    found = ask(only=probe.CUDA, FAKE_CU_INIT=status, CUDA_VISIBLE_DEVICES="7")
    assert found["detail"] == (
        f"the NVIDIA driver is here and does not work: cuInit: {words}; CUDA_VISIBLE_DEVICES='7'"
    )


@without_driver
def test_cuda_without_a_gpu(ask: Ask) -> None:
    assert ask(only=probe.CUDA)["detail"] == "the NVIDIA driver is here, and no GPU"


def test_another_order_than_nvmls(ask: Ask) -> None:
    found = ask(TURING, HOPPER, FAKE_CUDA_CARDS=HOPPER, CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert names(found) == ["H200 by FASTEST_FIRST"]


@pytest.mark.parametrize(
    ("card", "variables"),
    [(HOPPER + "m", {}), (HOPPER, {"CUDA_VISIBLE_DEVICES": "MIG-1"})],
    ids=["split", "part named"],
)
def test_parts_of_a_card(ask: Ask, card: str, variables: dict[str, str]) -> None:
    found = ask(card, FAKE_CUDA_CARDS="H200 MIG,9,0,17,0,", **variables)
    assert names(found) == ["H200 MIG by PCI_BUS_ID"]


# --- what vox makes of it -------------------------------------------------------------------------


def test_vox_takes_the_gpu_before_the_cpu(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "VOX_OVERRIDE_HARDWARE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    monkeypatch.setenv("FAKE_CARDS", HOPPER)
    selection = Seen().select(Request("train"))
    assert selection.why.startswith("backend cuda 0.1.0, an accelerator: H200 (sm_90), 141.0 GB")
    assert selection.hardware.devices[0].available_bytes == 140 * GB
