"""What selection is tested with: backends of every sort, and a case with its answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any

from vox_core.contract import DType, Quant
from vox_core.errors import BackendError
from vox_core.host import Request, Selection
from vox_core.host.discover import Found
from vox_core.host.judge import Candidate, Surroundings
from vox_core.host.manifest import Capabilities, Manifest, Probe, Requires
from vox_core.host.probe import Accelerator, Device, Hardware, Machine, ProbeFault
from vox_core.host.select import select

GB = 10**9
MACHINE = Machine("linux", "x86_64", "3.11.7", {"torch": "2.13.0"}.get)
KNOWN = {"cpu": "vox-ml-cpu", "cuda": "vox-ml-cuda", "mlx": "vox-ml-mlx"}
TRAIN = Request("train")


def backend(
    id: str,
    hardware: Hardware | ProbeFault | None,
    priority: int = 10,
    quants: tuple[Quant, ...] = ("none",),
    dtypes: tuple[DType, ...] = ("bf16", "fp32"),
    families: tuple[str, ...] = ("*",),
    api: str = "2.0",
    requires: Requires | None = None,
    automatic: bool = True,
) -> Candidate:
    manifest = Manifest(
        id=id,
        name=id.upper(),
        version="0.1.0",
        api=api,
        licence="MIT",
        priority=priority,
        automatic=automatic,
        capabilities=Capabilities(("x",), quants, dtypes, ("lora", "dora"), families),
        requires=requires or Requires(),
        probe=Probe("probe.py"),
    )
    return Candidate(replace(found(id), manifest=manifest), hardware)


def found(id: str, fault: BackendError | None = None) -> Found:
    return Found(
        id, f"vox-ml-{id}", "0.1.0", EntryPoint(id, "x:y", "vox_core.plugins"), fault=fault
    )


def here(tag: str, memory: int | None = 24 * GB) -> Hardware:
    return Hardware(True, (Device(f"{tag} 1", tag, memory, memory),), f"one {tag}")


def broken(id: str) -> Candidate:
    fault = BackendError(
        "B006", "a plugin's manifest is invalid", faults=["api: missing"], remedy="mend it"
    )
    return Candidate(found(id, fault))


CPU = backend("cpu", here("cpu"))
NEEDS_NVIDIA = Requires(hardware_tag="nvidia")
CUDA = backend("cuda", here("nvidia"), 50, ("none", "nf4"), requires=NEEDS_NVIDIA)
NO_DRIVER = Hardware(False, (), "no NVIDIA driver found (libcuda.so.1)")
LITTLE_GPU = Hardware(True, (*here("cpu").devices, *here("nvidia", 8 * GB).devices), "two devices")
CUDA_ABSENT = replace(CUDA, hardware=NO_DRIVER)
MLX = backend("mlx", here("apple"), 40, ("none", "affine4"))
MLX_CPU = backend("mlx", here("cpu"), 5, ("none", "affine4"))


ORACLE = backend("oracle", here("cpu"), 99, automatic=False)


@dataclass(frozen=True)
class Case:
    """`expected` is the id that is chosen, or the code of the error; `says` is part of the text."""

    candidates: list[Candidate]
    expected: str
    says: str
    request: Request = TRAIN
    accelerators: tuple[Accelerator, ...] = ()
    blocked: dict[str, str] = field(default_factory=dict)
    machine: Machine = MACHINE
    known: dict[str, str] = field(default_factory=KNOWN.copy)


def ask(id: str, **wishes: Any) -> Request:
    return Request("train", explicit=id, **wishes)


def environment(case: Case) -> Surroundings:
    return Surroundings(case.machine, case.accelerators, case.blocked, case.known)


def answer(case: Case, candidates: list[Candidate]) -> Selection | str:
    try:
        return select(case.request, candidates, environment(case))
    except BackendError as error:
        return str(error)
