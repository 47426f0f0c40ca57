"""Test the package: valid manifest, import without effects, fast probe, all hooks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from vox_core.api.host import (
    Failed,
    Hardware,
    ProbeFault,
    Request,
    Seen,
    load_backend,
    resolve_dtype,
    run,
    select,
)
from vox_core.contract import DType, Method, Optimizer, Quant
from vox_core.errors import BackendError
from vox_testing.subject import Declared
from vox_testing.suite.requirements import needs

LIBRARIES = (
    "accelerate",
    "bitsandbytes",
    "jax",
    "mlx",
    "mlx_lm",
    "peft",
    "tensorflow",
    "tinygrad",
    "torch",
    "transformers",
)
# Processor time, which a busy machine does not stretch. `vox backend explain` and the start of a
# run wait for the import; vox's own CPU backend takes 0.2 s, nearly all of it vox and pluggy.
IMPORT_LIMIT_S = 1.0
# Of the clock, for one that hangs: what an observer's import is granted.
HANGS_S = 60.0

_IMPORT = """
import importlib, json, sys, time
importlib.import_module(sys.argv[1])
with open(sys.argv[2], "w") as file:
    json.dump([sorted(sys.modules), time.process_time()], file)
"""


def test_the_manifest_is_valid(vox_declared: Declared) -> None:
    """The manifest is valid, and everything that it names exists."""
    manifest, folder = vox_declared.manifest, vox_declared.found.folder
    assert manifest.probe is not None, "a backend has a probe"
    assert folder is not None
    assert (folder / manifest.probe.file).is_file()


def test_importing_the_package_does_nothing(vox_declared: Declared, tmp_path: Path) -> None:
    """Importing loads no tensor library, prints nothing and is fast."""
    module, told = vox_declared.found.entry_point.module, tmp_path / "told.json"
    try:
        done = run([sys.executable, "-c", _IMPORT, module, str(told)], HANGS_S)
    except Failed as fault:
        pytest.fail(f"importing {module}: its process {fault}")
    assert done.returncode == 0, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    assert done.stderr == b"", f"importing {module} wrote to stderr"
    assert done.stdout == b"", f"importing {module} wrote to stdout"
    modules, seconds = json.loads(told.read_text())
    assert sorted(set(LIBRARIES) & set(modules)) == [], "import these inside the hooks"
    assert seconds < IMPORT_LIMIT_S


def test_the_probe_answers_in_time(vox_declared: Declared) -> None:
    """The probe ends in time, using the standard library only."""
    answer = vox_declared.hardware
    assert not isinstance(answer, ProbeFault), answer.reason
    assert answer.detail, "say in `detail` what was found, or how it shows that there is none"


def test_every_hook_is_there(vox_declared: Declared) -> None:
    """Every declared operation has its hook, with the arguments that vox passes."""
    backend = load_backend(vox_declared.found, "load")
    backend.require("train")
    backend.require("merge")


@needs(operation="train")
def test_the_dtype_that_auto_becomes_is_declared(vox_declared: Declared) -> None:
    """The probe's best dtype, or fp32 without one, is declared."""
    assert isinstance(vox_declared.hardware, Hardware)
    assert resolve_dtype("auto", vox_declared.hardware) in vox_declared.manifest.capabilities.dtypes


@needs(operation="train")
def test_undeclared_capabilities_are_refused(
    vox_declared: Declared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vox refuses while planning what the manifest does not list.

    So a backend is never handed such a job, and need not look for one: what it declares is what
    the other tests ask of it.
    """
    monkeypatch.delenv("VOX_DISABLE_PLUGINS", raising=False)
    has, found = vox_declared.manifest.capabilities, vox_declared.found
    request = Request("train", explicit=found.id)
    asked = Seen().survey(request)
    assert select(request, *asked).chosen == found.id
    wishes: list[tuple[dict[str, Any], bool]] = [
        *(({"quant": quant}, quant in has.quantisations) for quant in get_args(Quant)),
        *(({"dtype": dtype}, dtype in has.dtypes) for dtype in get_args(DType)),
        *(({"method": method}, method in has.methods) for method in get_args(Method)),
        *(({"optimizer": name}, name in has.optimizers) for name in get_args(Optimizer)),
        ({"model_type": "no-such-family"}, "*" in has.families),
        ({"streamed": True}, has.streamed_load),
    ]
    for wish, declared in wishes:
        if not declared:
            with pytest.raises(BackendError, match=r"unusable") as caught:
                select(replace(request, **wish), *asked)
            assert "capability" in str(caught.value), wish
