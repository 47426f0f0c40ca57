"""The suite itself: its reference, what it exports, and what it costs those who do not use it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import vox_testing.plugin
from vox_core.adapter.targets import format_of
from vox_core.contract import Quant
from vox_formats.quant import CODECS
from vox_testing import reference, suite
from vox_testing.jobs import curve, plan, start, stirred
from vox_testing.llama import write_llama
from vox_testing.quantised import round_trip
from vox_testing.reference import Reference
from vox_testing.suite.configurations import MODELS

THEIRS = """
import json, pathlib, sys

def test():
    pathlib.Path("seen.json").write_text(json.dumps([*sys.modules]))
"""
TOKENS = np.arange(5, 69, dtype=np.int64)
# Two float64 forwards of one formula, but transformers computes rotary angles in float32, whose
# roundoff is 6e-8 relative, of angles up to 64. Seen: 4e-7.
ANGLES = 4e-6


@pytest.mark.parametrize("configuration", MODELS)
def test_the_reference_is_transformers_llama(tmp_path: Path, configuration: str) -> None:
    """In every configuration, each of which makes a difference."""
    folder = write_llama(tmp_path / "away", **MODELS[configuration])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(TOKENS)[None]).logits[0].numpy()
    found = Reference.of(folder).logits(TOKENS)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < ANGLES
    default = Reference.of(write_llama(tmp_path / "default")).logits(TOKENS)
    same = configuration == "no head_dim"  # the quotient is the default
    assert (np.linalg.norm(found - default) == 0) == same


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
def test_the_reference_adapter_is_pefts(tmp_path: Path, method: str) -> None:
    from peft import PeftModel

    from vox_core.adapter.peft import write_adapter

    folder = write_llama(tmp_path / "base")
    made = plan(folder, method=method)
    adapter = stirred(start(folder, made)).adapter
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", adapter, base=str(folder), modules=made.modules)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").double().eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(TOKENS)[None]).logits[0].numpy()
    found = Reference.of(folder).logits(TOKENS, adapter)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < ANGLES


def test_another_familys_reference_is_the_same_model_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Llama both ways are open, and have to agree."""
    folder = write_llama(tmp_path)
    mine = Reference.of(folder)
    adapter = stirred(start(folder, plan(folder, method="dora"))).adapter
    (step,) = curve(1)
    expected = mine.loss(step, adapter)
    monkeypatch.setattr(
        reference,
        "llama_logits",
        lambda weights, tokens_T, _config: reference._transformers_logits(
            folder, weights, tokens_T
        ),
    )
    assert mine.loss(step, adapter) == pytest.approx(expected, rel=ANGLES)


def test_every_test_of_every_module_is_exported_once() -> None:
    written = [
        node.name
        for file in Path(suite.__file__).parent.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted(written) == sorted(suite.__all__)


def test_the_plugin_costs_those_nothing_who_do_not_use_the_suite(tmp_path: Path) -> None:
    """pytest loads it wherever vox-ml-testing is installed."""
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    command = [sys.executable, "-m", "pytest", "-p", vox_testing.plugin.__name__, "-q"]
    done = subprocess.run(
        [*command, "--strict-markers", "-c", "/dev/null", "--rootdir", ".", "test_theirs.py"],
        cwd=tmp_path,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    ours = {name for name in json.loads((tmp_path / "seen.json").read_text()) if "vox_" in name}
    assert ours == {"vox_testing", "vox_testing.plugin"}


def test_without_a_backend_the_author_is_told_how_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("from vox_testing.suite import *\n")
    command = [sys.executable, "-m", "pytest", "-p", vox_testing.plugin.__name__, "-q", "-x"]
    done = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", ".", "test_it.py"],
        cwd=tmp_path,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no backend to test: set vox_backend" in done.stdout


@pytest.mark.parametrize("quant", CODECS)
def test_the_reference_of_a_quantisation_is_the_codecs(quant: Quant) -> None:
    """Which computes in float32."""
    weight_OI = 0.2 * np.random.default_rng(0).standard_normal((128, 64))
    expected = CODECS[quant].round_trip(weight_OI.astype(np.float32)).astype(np.float64)
    found = round_trip(quant, weight_OI)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-6


def test_every_quantisation_has_a_reference_for_all_that_it_reaches() -> None:
    weight_OI = np.random.default_rng(0).standard_normal((4, 64))
    weight_OI[1] = 0
    for quant in get_args(Quant):
        if quant != "none":
            for path in ("model.layers.0.mlp.up_proj", "model.embed_tokens"):
                found = round_trip(format_of(path, quant), weight_OI)
                assert 1e-3 < np.linalg.norm(found - weight_OI) / np.linalg.norm(weight_OI) < 0.2
                assert not found[1].any()
