"""`vox export`: what is printed, and that its flags reach the service."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vox_core.contract import Notice
from vox_export.convert import ConvertReport
from vox_export.equivalence import SameLogits


@dataclass
class Converting:
    """`vox_export.convert.convert`; without `logits`, one backend is missing."""

    logits: SameLogits | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, reference: str, settings: Any, *, observe: Any, **_: Any) -> ConvertReport:
        self.calls.append((reference, settings))
        observe(Notice("comparing"))
        out = settings.out or Path(f"{reference}-{settings.to}")
        why = None if self.logits else "no usable backend for mlx (mlx: not installed)"
        return ConvertReport(
            out,
            "peft",
            settings.to.removesuffix("-lora"),
            "m",
            14,
            1,
            3e-8,
            self.logits,
            why,
            ("it is big",),
        )


def test_convert_shows_its_checks(vox, monkeypatch) -> None:
    same = SameLogits(("cpu", "mlx"), 1e-6, 2e-5, 1.0, 32)
    service = Converting(same)
    monkeypatch.setattr("vox_export.convert.convert", service)
    done = vox("export", "runs/a", "--to", "mlx-lora", "--out", "there", "--model", "org/m")
    assert (done.code, done.err) == (0, "comparing\n")
    ((reference, settings),) = service.calls
    assert (reference, settings.to, settings.model) == ("runs/a", "mlx-lora", "org/m")
    assert done.out.splitlines() == [
        "exported  there",
        "format    PEFT to mlx-lm",
        "base      m, 14 modules, 1 whole tensor",
        "update    differs from the source's by 3.0e-08 of its size at most",
        "logits    cpu and mlx differ by 2.0e-05 at most (1.0e-06 of their size) at 32 positions",
        "note: it is big",
        "next: vox chat there",
    ]


def test_convert_says_why_logits_were_not_compared(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_export.convert.convert", Converting())
    out = vox("export", "runs/a", "--to", "mlx-lora").out
    assert "logits    not compared: no usable backend for mlx (mlx: not installed)" in out


def test_convert_as_json(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_export.convert.convert", Converting())
    told = json.loads(vox("export", "runs/a", "--to", "peft", "--json").out)
    assert (told["out"], told["format"], told["logits"]) == ("runs/a-peft", "peft", None)


@pytest.mark.parametrize(("flags", "code"), [((), "C004"), (("--to", "onnx"), "C00")])
def test_convert_needs_a_format_it_knows(vox, flags, code) -> None:
    done = vox("export", "runs/a", *flags)
    assert done.code == 2
    assert f"error[VOX-{code}" in done.err


def test_a_number_format_is_found_in_upper_case(vox) -> None:
    done = vox("export", "m", "--to", "gguf", "--quant", "Q4_K_M")
    assert done.code == 2 and "next: did you mean q4_k_m? choose one of them\n" in done.err


def test_the_next_command_is_quoted_for_a_shell(vox, monkeypatch) -> None:
    monkeypatch.setattr("vox_export.convert.convert", Converting())
    there = "over there/it's"
    last = vox("export", "it's mine/a run", "--to", "mlx-lora", "--out", there).out.splitlines()[-1]
    assert shlex.split(last.removeprefix("next: ")) == ["vox", "chat", there]
