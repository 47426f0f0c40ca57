"""Selection, as a table: machines with plugins on them, requests, and what is chosen or said.

A scenario's candidates are shuffled many times; the answer, or the whole text of the error, has to
stay the same.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.core.idle_cases import IDLE
from tests.core.select_samples import (
    CPU,
    CUDA,
    CUDA_ABSENT,
    GB,
    KNOWN,
    LITTLE_GPU,
    MACHINE,
    MLX_CPU,
    NEEDS_NVIDIA,
    ORACLE,
    TRAIN,
    Case,
    answer,
    ask,
    backend,
    broken,
    environment,
    here,
)
from vox_core.errors import BackendError
from vox_core.host import Request
from vox_core.host.blocked import COMMAND
from vox_core.host.judge import Surroundings, judge_all, static_refusal
from vox_core.host.manifest import Requires
from vox_core.host.probe import NVIDIA, ProbeFault
from vox_core.host.select import select

CASES = {
    # automatic
    "only one": Case([CPU], "cpu", "the only usable backend"),
    "accelerator before the CPU": Case([CPU, CUDA], "cuda", "an accelerator"),
    "whatever the priority": Case(
        [backend("cpu", here("cpu"), 1000), CUDA], "cuda", "an accelerator"
    ),
    "no driver": Case([CPU, CUDA_ABSENT], "cpu", "the only usable backend"),
    "an accelerator's backend on the CPU accelerates nothing": Case(
        [CPU, MLX_CPU], "cpu", "higher priority than mlx (10 vs 5)"
    ),
    "higher priority": Case(
        [CUDA, backend("other", here("nvidia"), 60)],
        "other",
        "higher priority than cuda (60 vs 50)",
    ),
    "tie": Case([CPU, backend("third", here("cpu"))], "B005", "distribution vox-ml-third"),
    "no tie with one that is refused": Case(
        [CPU, backend("third", here("cpu"), api="3.0")], "cpu", "the only usable backend"
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
    "optimizer": Case(
        [CPU],
        "B002",
        "capability: optimizer adamw-8bit (has: adamw)",
        Request("train", optimizer="adamw-8bit"),
    ),
    "family": Case(
        [backend("cpu", here("cpu"), families=("llama",))],
        "B002",
        "model family gpt2 (has: llama)",
        Request("load", model_type="gpt2"),
    ),
    "streamed": Case([CPU], "B002", "load streamed (has: none)", Request("load", streamed=True)),
    "several targets": Case(
        [CPU],
        "B002",
        "targets of a position several (has: none)",
        Request("train", several_targets=True),
    ),
    # what a plugin needs
    "newer API": Case([backend("cpu", None, api="2.9")], "B002", "rejected  api: written for 2.9"),
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
    "by name, disabled": Case(
        [CPU], "B002", "next: vox plugin enable cpu, or see", ask("cpu"), blocked={"cpu": COMMAND}
    ),
    "by name, blocked": Case(
        [CPU],
        "B002",
        "next: take cpu off VOX_DISABLE_PLUGINS, or see",
        ask("cpu"),
        blocked={"cpu": "VOX_DISABLE_PLUGINS"},
    ),
    "by name, no hardware, and what to look at": Case(
        [CPU, CUDA_ABSENT], "B002", "next: check that `nvidia-smi` lists the GPU", ask("cuda")
    ),
    "by name, its probe at fault": Case(
        [backend("bad", ProbeFault("its probe failed: exit 3"))],
        "B004",
        "next: upgrade it: vox plugin upgrade bad; if that does not help, report it to the authors",
        ask("bad"),
    ),
    "by name, a native library missing": Case(
        [
            backend(
                "bad",
                ProbeFault("its probe failed: OSError: libx.so: cannot open"),
                requires=Requires(native_libs=("libx.so",)),
            )
        ],
        "B004",
        "next: install what brings libx.so",
        ask("bad"),
    ),
    "by name, a distribution missing": Case(
        [backend("bad", None, requires=Requires(distributions=("mlx>=0.32",)))],
        "B004",
        "next: install its requirements: vox plugin upgrade bad",
        ask("bad"),
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
    **IDLE,
}


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
        told = [
            each.verdict for each in judge_all(case.request, case.candidates, environment(case))
        ]
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
        assert accelerator.name in got.why


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_has_a_verdict_with_a_reason(name: str) -> None:
    case = CASES[name]
    told = [each.verdict for each in judge_all(case.request, case.candidates, environment(case))]
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
    selection = select(TRAIN, [CPU, CUDA, broken("bad")], Surroundings(MACHINE))
    record = json.loads(json.dumps(selection.to_json()))
    assert record["chosen"] == "cuda"
    assert record["hardware"]["devices"][0]["tag"] == "nvidia"
    statuses = {verdict["id"]: verdict["status"] for verdict in record["verdicts"]}
    assert statuses == {"bad": "broken", "cpu": "available", "cuda": "chosen"}


def test_others_are_not_asked_for_when_one_is() -> None:
    selection = select(ask("cpu"), [CPU, CUDA], Surroundings(MACHINE))
    reasons = {verdict.id: verdict.reason for verdict in selection.verdicts}
    assert reasons["cuda"] == "not asked for (--backend cpu)"


def test_only_survivors_need_their_hardware_probed() -> None:
    plugins = [CPU, CUDA, backend("old", None, api="0.1"), broken("bad")]
    request = Request("train", quant="nf4")
    probed = [
        each.found.id
        for each in plugins
        if not static_refusal(request, each.found, Surroundings(MACHINE))
    ]
    assert probed == ["cuda"]


def test_a_broken_backend_asked_for_keeps_the_cause() -> None:
    with pytest.raises(BackendError) as caught:
        select(ask("bad"), [broken("bad")], Surroundings(MACHINE))
    assert isinstance(caught.value.__cause__, BackendError)
    assert caught.value.remedy == "mend it"


@pytest.mark.parametrize("explicit", [None, "cpu"])
def test_a_quantisation_that_only_the_catalog_has_names_who_to_install(explicit) -> None:
    request = replace(TRAIN, quant="affine4", explicit=explicit)
    environment = Surroundings(MACHINE, known=KNOWN, able=("mlx",))
    with pytest.raises(BackendError) as caught:
        select(request, [CPU], environment)
    assert caught.value.code == "VOX-B002"
    assert "vox plugin install mlx" in caught.value.remedy


def test_a_quantisation_of_a_disabled_backend_names_how_to_take_it_off_the_list() -> None:
    environment = Surroundings(
        MACHINE, known=KNOWN, able=("mlx",), blocked={"mlx": "vox plugin disable mlx"}
    )
    with pytest.raises(BackendError) as caught:
        select(replace(TRAIN, quant="affine4"), [CPU, MLX_CPU], environment)
    assert "vox plugin install" not in caught.value.remedy
    assert "mlx" in caught.value.remedy
