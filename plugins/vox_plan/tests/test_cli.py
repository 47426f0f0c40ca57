"""What `vox plan` hands to its service, and how a plan is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.fixtures import _clean_place  # noqa: F401 - autouse

from vox_core.config import TrainSettings
from vox_plan import report as planning
from vox_plan.cli import SECTIONS
from vox_plan.memory_forecast import Option
from vox_plan.report import PlanReport

GB = 10**9
OPTIONS = (
    Option("none", False, 512, 3 * GB),
    Option("none", False, 1024, 5 * GB),
    Option("none", True, 512, 2 * GB),
    Option("none", True, 1024, 4 * GB),
)
REPORT = PlanReport(
    backend=planning.BackendPlan("cpu", "0.1.0", "a CPU", "backend cpu 0.1.0, the only one: 8 GB"),
    model=planning.ModelPlan("m", Path("models/m"), None, "MIT", "llama", fetched=False),
    dtype="bf16",
    quant="none",
    data={
        "rows": 10,
        "documents": 9,
        "tokens": 9000,
        "trained_tokens": 4000,
        "dropped": {"nothing to train": 1},
        "truncated": {},
        "longest": 1200,
    },
    valid=None,
    assumed=None,
    steps=planning.StepPlan(
        2,
        8,
        8000,
        512,
        False,
        2048,
        {"laid": 1200, "padded": 1200, "trained": 9, "longest": 1200},
        planning.Work(1.75, 16, 16000, 7100),
    ),
    adapter=planning.AdapterPlan("lora", 16, 14, ("k_proj", "q_proj"), 12345),
    speed=None,
    memory=planning.MemoryPlan(3 * GB, {"runtime": GB, "weights": 2 * GB}, 8 * GB, 4 * GB, True),
    options=OPTIONS,
    suggested=(planning.Suggestion(4 * GB, OPTIONS[0]),),
    disk=planning.DiskPlan(500_000, 9 * GB, Path("disk")),
    merge=planning.MergePlan(
        planning.MemoryPlan(GB, {"runtime": GB}, 8 * GB, 4 * GB, True),
        planning.DiskPlan(2 * GB, 9 * GB, Path("disk")),
    ),
    objective="sft",
    run=Path("runs/m"),
    writes=("plan.json", "README.md"),
    warnings=(),
    found={},
    settings={"rank": 16},
)


@dataclass
class Planning:
    """In place of `vox_plan.planner.plan`."""

    report: PlanReport = REPORT
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, settings: TrainSettings, **rest: Any) -> PlanReport:
        self.calls.append({"settings": settings, **rest})
        return self.report


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Planning:
    made = Planning()
    monkeypatch.setattr("vox_plan.planner.plan", made)
    return made


def test_a_plan_is_shown(vox, service) -> None:
    done = vox("plan", "--model", "m")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "peak memory  about 3.0 GB of 4.0 GB free, 8.0 GB in all",
        "  runtime    1.0 GB",
        "  weights    2.0 GB",
        "time         unknown: no earlier run of this model here; --measure runs a few steps",
        "backend      cpu 0.1.0, the only one: 8 GB",
        "model        m (llama), licence MIT",
        "precision    bf16, no quantization",
        "data         10 rows, 9 examples, 9,000 tokens, 4,000 trained; longest 1200",
        "  dropped    1 nothing to train",
        "steps        2, of 8 examples each: 1.75 epochs, or 16 examples with 16,000 tokens, "
        "7,100 of them trained; at most 1,200 tokens at once",
        "adapter      lora, rank 16, 12,345 parameters, 14 modules: k_proj, q_proj",
        "disk         up to 0 MB of 9.0 GB free in disk",
        "to merge it  about 1.0 GB of 4.0 GB free, 8.0 GB in all; disk up to 2.0 GB of 9.0 GB free "
        "in disk",
        "would write  runs/m: plan.json, README.md",
        "",
        "settings that fit in 4.0 GB with a 10 % margin, by --micro-batch-tokens:",
        "",
        "--quant  --gradient-checkpointing  512     1024",
        "none     off                       3.0 GB  -",
        "none     on                        2.0 GB  -",
        "",
        "4.0 GB: these settings fit   (3.0 GB)",
    ]


def test_a_plan_of_full_fine_tuning_has_no_adapter(vox, service) -> None:
    memory = replace(REPORT.memory, parts={"weights": 2 * GB, "adapter": GB})
    full = planning.AdapterPlan("full", 16, 0, (), 12345)
    service.report = replace(REPORT, adapter=full, memory=memory, merge=None)
    done = vox("plan", "--model", "m", "--method", "full")
    assert "  optimizer       1.0 GB" in done.out
    assert "adapter" not in done.out


def test_what_was_measured_is_shown(vox, service) -> None:
    speed = planning.SpeedPlan(
        200.0,
        80.0,
        chosen="1024 tokens at once, threads half",
        gain=1.1,
        refused={"layout padded": "loss 2, expected 1"},
        fast={"adapters": 14, "norms": 5},
        own={"adapters with DoRA": 2},
        measured=0.0,
    )
    service.report = replace(REPORT, speed=speed)
    lines = vox("plan").out.splitlines()
    assert lines[3:9] == [
        "speed         200 tokens/s, as it was tuned",
        "time          about 1:20: steps 1:20",
        "  with        1024 tokens at once, threads half; 1.10 times as fast as the defaults",
        "  thrown out  layout padded: loss 2, expected 1",
        "  fast        14 adapters, 5 norms",
        "  not fast    2 adapters with DoRA",
    ]
    measured = replace(speed, how="measured", steps=5, loading=4.0, validating=6.0, chosen="")
    seen = replace(REPORT.memory, measured=2 * GB)
    service.report = replace(REPORT, speed=measured, memory=seen)
    assert "so far      2.0 GB, in the steps that were measured" in vox("plan").out
    service.calls.pop()
    assert vox("plan", "--measure").out.splitlines()[4:6] == [
        "speed         200 tokens/s, 5 steps measured now",
        "time          about 1:30: steps 1:20, loading 0:04, validations 0:06",
    ]
    assert [call["measured"] for call in service.calls] == [False, True]
    earlier = replace(speed, how="earlier", steps=19, run="runs/a", chosen="", refused={})
    service.report = replace(REPORT, speed=earlier)
    assert vox("plan").out.splitlines()[3:5] == [
        "speed        200 tokens/s, as in runs/a (19 steps); --measure runs a few of this run",
        "time         about 1:20: steps 1:20",
    ]


def test_whatever_was_found_of_the_rows_is_shown(vox, service) -> None:
    """An account may have more in it than this command knows of."""
    data = {
        **REPORT.data,
        "per_file": {
            "a.jsonl": {"rows_in": 9, "why": {"no_rating": 2}},
            "my_b.jsonl": {"rows_in": 1},
        },
        "side": "by content",
        "nothing": [],
    }
    audit = [{"code": "W3", "rows": [1, 2], "what": "two BOS"}, "and more"]
    service.report = replace(REPORT, data=data, found={"mask_audit": audit})
    lines = vox("plan").out.splitlines()
    assert [" ".join(line.split()) for line in lines[8:15]] == [
        "dropped 1 nothing to train",
        "per file a.jsonl: 9 rows in",
        "a.jsonl: why: 2 no rating",
        "my_b.jsonl: 1 rows in",
        "side by content",
        "mask audit code W3, what two BOS; rows: 1, 2",
        "and more",
    ]


def test_prompts_are_called_prompts(vox, service) -> None:
    data = {**REPORT.data, "trained_tokens": 0} if REPORT.data else None
    service.report = replace(REPORT, data=data, audit={"training": {"prompts": 9}})
    lines = [" ".join(line.split()) for line in vox("plan").out.splitlines()]
    assert "data 10 rows, 9 prompts, 9,000 tokens; longest 1200" in lines
    assert "masks 9 prompts, which the model answers" in lines


def test_rows_that_are_left_out_are_told_in_words(vox, service) -> None:
    """In `--json` they are counted, file by file."""
    found = {"rows": {"files": [{"file": "a.jsonl", "rows": 9}], "leaked": 0}}
    service.report = replace(REPORT, found=found)
    assert "a.jsonl" not in vox("plan").out
    service.report = replace(REPORT, found=found, chosen=("a.jsonl: 7 of 9 rows",))
    lines = [" ".join(line.split()) for line in vox("plan").out.splitlines()]
    assert [line for line in lines if "a.jsonl" in line] == ["rows a.jsonl: 7 of 9 rows"]
    assert json.loads(vox("plan", "--json").out)["found"] == found


def test_as_json_it_is_one_object(vox, service) -> None:
    told = json.loads(vox("plan", "--json").out)
    assert told["memory"] == {
        "peak": 3 * GB,
        "parts": {"runtime": GB, "weights": 2 * GB},
        "total": 8 * GB,
        "free": 4 * GB,
        "fits": True,
        "measured": None,
    }
    assert told["options"][0] == {
        "quant": "none",
        "gradient_checkpointing": False,
        "micro_batch_tokens": 512,
        "peak": 3 * GB,
    }
    assert told["suggested"] == [
        {"memory": 4 * GB, "option": told["options"][0], "measured": False}
    ]
    assert (told["run"], told["model"]["licence"]) == ("runs/m", "MIT")
    assert (told["format"], told["settings"], told["exact"]) == ("vox-plan/2", {"rank": 16}, None)
    vox("plan")
    assert [call["to_be_run"] for call in service.calls] == [True, False]


def test_it_takes_the_settings_of_train(vox, service, tmp_path: Path) -> None:
    (tmp_path / "vox.toml").write_text('[train]\nrank = 4\nbackend = "cpu"\n')
    vox("plan", "--lr", "1e-3")
    (call,) = service.calls
    assert (call["settings"].rank, call["settings"].lr) == (4, 1e-3)
    assert (call["settings"].backend, call["memory"]) == ("cpu", [])
    placed = [name for names in SECTIONS.values() for name in names]
    rest = ["config_file", "as_json", "memory", "measure"]
    assert sorted(placed) == sorted([*TrainSettings.model_fields, *rest])


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (["24GB"], [24 * GB]),
        (["24"], [24 * GB]),
        (["1.5gib", "512 MB"], [3 * 2**29, 512 * 10**6]),
        (["presets"], [8 * GB, 16 * GB, 24 * GB, 48 * GB, 80 * GB]),
        (["8GB", "presets"], [8 * GB, 16 * GB, 24 * GB, 48 * GB, 80 * GB]),
    ],
)
def test_sizes(vox, service, given: list[str], sizes: list[int]) -> None:
    assert vox("plan", *(f"--memory={text}" for text in given)).code == 0
    assert service.calls[0]["memory"] == sizes


@pytest.mark.parametrize("text", ["much", "0GB", "8TB", "-1", "9" * 400])
def test_what_is_no_size_is_refused(vox, service, text: str) -> None:
    done = vox("plan", f"--memory={text}")
    assert done.code == 2
    assert "24GB" in done.err
    assert service.calls == []


def test_what_is_short_unknown_or_assumed_is_said(vox, service) -> None:
    short = replace(REPORT.memory, free=2 * GB, fits=False)
    service.report = replace(
        REPORT,
        memory=short,
        suggested=(planning.Suggestion(2 * GB, None),),
        data=None,
        assumed={"documents": 8, "tokens": 2048},
        steps=replace(REPORT.steps, total=None, work=None),
        model=replace(REPORT.model, fetched=True),
        warnings=("3 rows dropped",),
    )
    done = vox("plan")
    assert "about 3.0 GB of 2.0 GB free, 8.0 GB in all: more than there is" in done.out
    assert "2.0 GB: too little; the least is 2.0 GB" in done.out
    assert "none given; assumed: 8 examples of 2048 tokens per step" in done.out
    assert "as many as the data gives, of 8 examples each, about 8,000 tokens" in done.out
    assert "downloaded just now, as train would" in done.out
    assert done.err == "warning: 3 rows dropped\n"
    service.report = replace(REPORT, suggested=(planning.Suggestion(4 * GB, OPTIONS[0], True),))
    assert "these settings fit   (3.0 GB), measured to be the fastest here" in vox("plan").out
    service.report = replace(REPORT, suggested=(), memory=replace(short, free=None, total=None))
    assert "--memory SIZE suggests settings" in vox("plan").out
