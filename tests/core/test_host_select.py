"""Selection, as a table: machines with plugins on them, requests, and what is chosen or said.

A scenario's candidates are shuffled many times; the answer, or the whole text of the error, has to
stay the same.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from vox_core.contract import DType, Quant
from vox_core.errors import BackendError
from vox_core.host import Candidate, Environment, Request, Selection
from vox_core.host.discover import Found
from vox_core.host.machine import Machine
from vox_core.host.manifest import Capabilities, Manifest, Probe, Requires
from vox_core.host.probe import APPLE, NVIDIA, Accelerator, Device, Hardware, ProbeFault
from vox_core.host.select import needs_probe, select, verdicts

GB = 10**9
MACHINE = Machine("linux", "x86_64", "3.11.7", {"torch": "2.13.0"})
KNOWN = {"cpu": "vox-ml-cpu", "cuda": "vox-ml-cuda", "mlx": "vox-ml-mlx"}
TRAIN = Request("train")


def backend(
    id: str,
    hardware: Hardware | ProbeFault | None,
    priority: int = 10,
    quants: tuple[Quant, ...] = ("none",),
    dtypes: tuple[DType, ...] = ("bf16", "fp32"),
    families: tuple[str, ...] = ("*",),
    api: str = "1.0",
    requires: Requires | None = None,
    automatic: bool = True,
) -> Candidate:
    manifest = Manifest(
        id=id,
        name=id.upper(),
        version="0.1.0",
        api=api,
        licence="MIT",
        extension_points=("MlBackend",),
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
    return Request("train", explicit=id, explicit_origin="--backend", **wishes)


CASES = {
    # automatic
    "only one": Case([CPU], "cpu", "the only usable backend"),
    "accelerator before the CPU": Case([CPU, CUDA], "cuda", "an accelerator"),
    "whatever the priority": Case(
        [backend("cpu", here("cpu"), 1000), CUDA], "cuda", "an accelerator"
    ),
    "no driver": Case([CPU, CUDA_ABSENT], "cpu", "the only usable backend"),
    "an accelerator's backend on the CPU accelerates nothing": Case(
        [CPU, MLX_CPU], "cpu", "priority 10, before mlx with 5"
    ),
    "higher priority": Case(
        [CUDA, backend("other", here("nvidia"), 60)], "other", "priority 60, before cuda with 50"
    ),
    "tie": Case([CPU, backend("third", here("cpu"))], "B005", "distribution vox-ml-third"),
    "no tie with one that is refused": Case(
        [CPU, backend("third", here("cpu"), api="2.0")], "cpu", "the only usable backend"
    ),
    # stickiness
    "resumed where it was": Case(
        [CPU, backend("fast", here("cpu"), 99)],
        "cpu",
        "the run was started on it",
        Request("train", resumed_from="cpu"),
    ),
    "resumed settles a tie": Case(
        [CPU, backend("third", here("cpu"))],
        "third",
        "the run was started on it",
        Request("train", resumed_from="third"),
    ),
    "resumed on an accelerator that is here now": Case(
        [CPU, CUDA], "cuda", "an accelerator", Request("train", resumed_from="cpu")
    ),
    # memory
    "accelerator with enough memory": Case(
        [CPU, CUDA], "cuda", "with enough memory", Request("train", memory_needed=20 * GB)
    ),
    "accelerator with too little": Case(
        [CPU, replace(CUDA, hardware=here("nvidia", 8 * GB))],
        "cpu",
        "has enough memory, and cuda has not",
        Request("train", memory_needed=20 * GB),
    ),
    "memory beside the accelerator does not count": Case(
        [CPU, replace(CUDA, hardware=LITTLE_GPU)],
        "cpu",
        "has enough memory, and cuda has not",
        Request("train", memory_needed=20 * GB),
    ),
    "the larger of two accelerators": Case(
        [replace(CUDA, hardware=here("nvidia", 8 * GB)), backend("big", here("nvidia", 80 * GB))],
        "big",
        "has enough memory, and cuda has not",
        Request("train", memory_needed=20 * GB),
    ),
    "memory that is unknown": Case(
        [CPU, replace(CUDA, hardware=here("nvidia", None))],
        "cuda",
        "an accelerator with enough memory",
        Request("train", memory_needed=20 * GB),
    ),
    "too little everywhere": Case(
        [CPU], "cpu", "though short of memory", Request("train", memory_needed=99 * GB)
    ),
    # capabilities
    "the only one that can": Case(
        [CPU, MLX_CPU], "mlx", "the only usable backend", Request("train", quant="affine4")
    ),
    "none can": Case(
        [CPU, CUDA_ABSENT, MLX_CPU],
        "B002",
        "no usable backend for `train` with quantisation nf4",
        Request("train", quant="nf4"),
    ),
    "dtype": Case(
        [CPU], "B002", "capability: dtype fp16 (has: bf16, fp32)", Request("train", dtype="fp16")
    ),
    "method": Case(
        [CPU], "B002", "method rslora (has: lora, dora)", Request("train", method="rslora")
    ),
    "family": Case(
        [backend("cpu", here("cpu"), families=("llama",))],
        "B002",
        "model family gpt2 (has: llama)",
        Request("load", model_type="gpt2"),
    ),
    "streamed": Case([CPU], "B002", "load streamed (has: none)", Request("load", streamed=True)),
    # what a plugin needs
    "newer API": Case([backend("cpu", None, api="1.9")], "B002", "rejected  api: written for 1.9"),
    "other system": Case(
        [backend("cpu", None, requires=Requires(os=("macos",)))], "B002", "linux (needs: macos)"
    ),
    "missing distribution": Case(
        [backend("cpu", None, requires=Requires(distributions=("mlx>=0.32",)))],
        "B002",
        "broken    distribution: mlx>=0.32 is not installed",
    ),
    "hardware of another kind": Case(
        [backend("cuda", here("cpu"), requires=NEEDS_NVIDIA)],
        "B002",
        "no such hardware: needs nvidia, found cpu",
    ),
    "blocked": Case(
        [CPU], "B002", "blocked by VOX_DISABLE_PLUGINS", blocked={"cpu": "VOX_DISABLE_PLUGINS"}
    ),
    "broken probe": Case([backend("cpu", ProbeFault("it hung"))], "B002", "broken    it hung"),
    "nothing installed": Case([], "B001", "install 'cpu': vox plugin install cpu"),
    "nothing installed beside a GPU": Case(
        [], "B001", "install 'cuda': vox plugin install cuda", accelerators=(NVIDIA,)
    ),
    # by name
    "by name": Case([CPU, CUDA], "cpu", "asked for (--backend cpu)", ask("cpu")),
    "by name, without asking about the GPU": Case(
        [CPU], "cpu", "asked for (--backend cpu)", ask("cpu"), (NVIDIA,)
    ),
    "by name, despite a tie": Case(
        [CPU, backend("third", here("cpu"))], "third", "asked for", ask("third")
    ),
    "by name, not installed": Case(
        [CPU], "B003", "install 'cuda': vox plugin install cuda", ask("cuda")
    ),
    "by name, unknown": Case([CPU], "B003", "ask for 'cuda', if you meant that", ask("cudda")),
    "by name, unlike any": Case([CPU], "B003", "ask for one that is installed", ask("zzz")),
    "by name, broken": Case([CPU, broken("bad")], "B004", "invalid: api: missing", ask("bad")),
    "by name, broken probe": Case(
        [CPU, backend("bad", ProbeFault("it hung"))], "B004", "it hung", ask("bad")
    ),
    "by name, no hardware": Case(
        [CPU, CUDA_ABSENT], "B002", "no NVIDIA driver found (libcuda.so.1)", ask("cuda")
    ),
    "by name, cannot": Case(
        [CPU, CUDA], "B002", "run with `--quant none`", ask("cpu", quant="nf4")
    ),
    # only by name
    "only by name, not asked for": Case([CPU, ORACLE], "cpu", "the only usable backend"),
    "only by name, and alone": Case([ORACLE], "B002", "only by name: --backend oracle"),
    "only by name, and resumed": Case(
        [CPU, ORACLE], "cpu", "the only usable", Request("train", resumed_from="oracle")
    ),
    "only by name, asked for": Case([CPU, ORACLE], "oracle", "asked for", ask("oracle")),
    "GPU driven only by name": Case(
        [CPU, backend("x", here("nvidia"), requires=NEEDS_NVIDIA, automatic=False)],
        "B007",
        "'cuda' is not installed",
        accelerators=(NVIDIA,),
    ),
    # an accelerator that would lie idle
    "GPU without its plugin": Case(
        [CPU], "B007", "'cuda' is not installed", accelerators=(NVIDIA,)
    ),
    "Mac without its plugin": Case([CPU], "B007", "vox plugin install mlx", accelerators=(APPLE,)),
    "GPU that no known backend serves": Case(
        [CPU], "cpu", "an NVIDIA GPU is here", accelerators=(NVIDIA,), known={}
    ),
    "GPU, plugin broken": Case(
        [CPU, broken("cuda")], "B007", "'cuda' is broken", accelerators=(NVIDIA,)
    ),
    "GPU, probe broken": Case(
        [CPU, replace(CUDA, hardware=ProbeFault("it hung"))],
        "B007",
        "'cuda' is broken (it hung)",
        accelerators=(NVIDIA,),
    ),
    "GPU, plugin too new": Case(
        [CPU, backend("cuda", None, api="2.0")],
        "B007",
        "'cuda' is rejected (api: written for 2.0",
        accelerators=(NVIDIA,),
    ),
    "GPU idle, allowed": Case(
        [CPU],
        "cpu",
        "an NVIDIA GPU is here, but its backend 'cuda' is not installed",
        Request("train", allow_cpu=True),
        (NVIDIA,),
    ),
    "GPU idle, but not for training": Case(
        [CPU], "cpu", "an NVIDIA GPU is here", Request("merge"), (NVIDIA,)
    ),
    "GPU idle, plugin blocked": Case(
        [CPU, CUDA], "cpu", "only usable", accelerators=(NVIDIA,), blocked={"cuda": "vox.toml"}
    ),
    "GPU idle, plugin cannot": Case(
        [MLX_CPU, CUDA], "mlx", "only usable", Request("train", quant="affine4"), (NVIDIA,)
    ),
    "GPU seen by the core, not by the probe": Case(
        [CPU, CUDA_ABSENT], "cpu", "only usable", accelerators=(NVIDIA,)
    ),
    "GPU driven by a third party": Case(
        [CPU, backend("other", here("nvidia"), requires=NEEDS_NVIDIA)],
        "other",
        "an accelerator",
        accelerators=(NVIDIA,),
    ),
}


def environment(case: Case) -> Environment:
    return Environment(case.machine, case.accelerators, case.blocked, case.known)


def answer(case: Case, candidates: list[Candidate]) -> Selection | str:
    try:
        return select(case.request, candidates, environment(case))
    except BackendError as error:
        return str(error)


@pytest.mark.parametrize("name", CASES)
def test_the_right_backend_or_the_right_refusal(name: str) -> None:
    case = CASES[name]
    got = answer(case, case.candidates)
    if isinstance(got, str):
        assert f"VOX-{case.expected}" in got
        assert case.says in got
    else:
        assert (got.chosen, case.says in got.why) == (case.expected, True), got.why
        assert "\n" not in got.why


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_discovery_changes_nothing(name: str) -> None:
    case, order = CASES[name], random.Random(name)
    expected = answer(case, case.candidates)
    for _ in range(100):
        shuffled = order.sample(case.candidates, len(case.candidates))
        assert answer(case, shuffled) == expected


@pytest.mark.parametrize("name", CASES)
def test_no_fallback_is_silent(name: str) -> None:
    """Nobody else for one asked for; no other reason is lost; idle hardware is spoken of."""
    case = CASES[name]
    got = answer(case, case.candidates)
    if isinstance(got, str):
        told = verdicts(case.request, case.candidates, environment(case))
        if "VOX-B002" in got and not case.request.explicit:
            assert all(verdict.id in got and verdict.reason in got for verdict in told)
        return
    assert got.chosen == (case.request.explicit or got.chosen)
    assert [verdict.id for verdict in got.verdicts if verdict.status == "chosen"] == [got.chosen]
    others = [verdict for verdict in got.verdicts if verdict.status != "chosen"]
    assert len(others) == len(case.candidates) - 1
    assert all(verdict.reason for verdict in others)
    if case.accelerators and got.hardware.devices[0].tag == "cpu" and not case.request.explicit:
        (accelerator,) = case.accelerators
        refused = {verdict.id for verdict in others if verdict.status == "rejected"}
        assert accelerator.name in got.why or accelerator.backend in refused


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_has_a_verdict_with_a_reason(name: str) -> None:
    case = CASES[name]
    told = verdicts(case.request, case.candidates, environment(case))
    assert [verdict.id for verdict in told] == sorted(each.found.id for each in case.candidates)
    assert all(verdict.reason for verdict in told)


def test_the_table_is_for_reading() -> None:
    case = CASES["none can"]
    assert answer(case, case.candidates) == (
        "error[VOX-B002]: no usable backend for `train` with quantisation nf4\n"
        "  - cpu   0.1.0  rejected  capability: quantisation nf4 (has: none)\n"
        "  - cuda  0.1.0  rejected  no such hardware: no NVIDIA driver found (libcuda.so.1)\n"
        "  - mlx   0.1.0  rejected  capability: quantisation nf4 (has: none, affine4)\n"
        "next: run with `--quant none`, or see `vox backend explain`"
    )


def test_the_record_tells_all_of_it() -> None:
    selection = select(TRAIN, [CPU, CUDA, broken("bad")], Environment(MACHINE))
    record = json.loads(json.dumps(selection.to_json()))
    assert record["chosen"] == "cuda"
    assert record["hardware"]["devices"][0]["tag"] == "nvidia"
    statuses = {verdict["id"]: verdict["status"] for verdict in record["verdicts"]}
    assert statuses == {"bad": "broken", "cpu": "eligible", "cuda": "chosen"}


def test_others_are_not_asked_for_when_one_is() -> None:
    selection = select(ask("cpu"), [CPU, CUDA], Environment(MACHINE))
    reasons = {verdict.id: verdict.reason for verdict in selection.verdicts}
    assert reasons["cuda"] == "not asked for (--backend cpu)"


def test_only_survivors_need_their_hardware_probed() -> None:
    plugins = [CPU, CUDA, backend("old", None, api="0.1"), broken("bad")]
    request = Request("train", quant="nf4")
    probed = [
        each.found.id for each in plugins if needs_probe(request, each.found, Environment(MACHINE))
    ]
    assert probed == ["cuda"]


def test_a_broken_backend_asked_for_keeps_the_cause() -> None:
    with pytest.raises(BackendError) as caught:
        select(ask("bad"), [broken("bad")], Environment(MACHINE))
    assert isinstance(caught.value.__cause__, BackendError)
    assert caught.value.remedy == "mend it"
