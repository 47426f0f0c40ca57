"""`--optimizer`: refused where no backend has it, recorded where one has, kept on resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from vox_core.config import TrainSettings, validate
from vox_core.errors import BackendError, PlanError
from vox_core.host import Request
from vox_core.host.discover import discover
from vox_core.host.judge import lacking
from vox_core.host.manifest import FILE_NAME, parse_manifest
from vox_core.run import checkpoint
from vox_core.run.folder import RunFolder
from vox_core.run.train import train

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _the_cpu_alone(monkeypatch):
    others = {entry.name for entry in metadata.entry_points(group="vox_core.plugins")} - {"cpu"}
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", ",".join(sorted(others)))


@pytest.mark.parametrize(
    ("folder", "lack"),
    [
        ("plugins/vox_cpu/vox_cpu", ""),
        ("plugins/vox_cuda/vox_cuda", ""),
        ("plugins/vox_mlx/vox_mlx", "optimizer adamw-8bit (has: adamw)"),
        ("examples/vox_float64/vox_float64", "optimizer adamw-8bit (has: adamw)"),
        ("examples/vox_numpy/vox_numpy", "optimizer adamw-8bit (has: adamw)"),
    ],
)
def test_which_backends_have_moments_in_8_bits(folder, lack):
    file = ROOT / folder / FILE_NAME
    capabilities = parse_manifest(file.read_text(encoding="utf-8"), file).capabilities
    assert lacking(Request("train", optimizer="adamw-8bit"), capabilities) == lack
    assert lacking(Request("train", optimizer="adamw"), capabilities) == ""


def test_a_backend_without_it_refuses_before_anything_is_written(settings, tiny, monkeypatch):
    def without(found):
        has = replace(found.manifest.capabilities, optimizers=("adamw",))
        return replace(found, manifest=replace(found.manifest, capabilities=has))

    plugins = tuple(without(found) if found.id == "cpu" else found for found in discover())
    monkeypatch.setattr("vox_core.host.discover.discover", lambda: plugins)
    asked = settings(tiny("llama"), optimizer="adamw-8bit")
    with pytest.raises(BackendError, match=r"optimizer adamw-8bit \(has: adamw\)"):
        train(asked)
    assert not asked.out.exists()


def test_a_run_says_its_optimizer_and_keeps_it(settings, tiny):
    report = train(
        settings(tiny("llama"), optimizer="adamw-8bit", modules_to_save=["lm_head"], max_steps=2)
    )
    run = RunFolder(report.run)
    plan = json.loads((report.run / "plan.json").read_text())
    assert plan["contract"]["optimizer"]["name"] == "adamw-8bit"
    assert "| optimizer | AdamW with moments in 8 bits, " in (report.run / "README.md").read_text()
    # Half of a block's values share their level with others; in float32 next to none do.
    state, _ = checkpoint.load_newest(run.checkpoints)
    large = [pair for pair in state.moments.values() if pair[0].size >= 4096]  # lm_head's alone
    assert large
    for first, second in large:
        assert first.dtype == second.dtype == np.float32
        blocks = second.reshape(-1)[: second.size // 256 * 256].reshape(-1, 256)
        assert np.mean([len(np.unique(block)) for block in blocks]) < 192
    (report.run / "vox_adapter.json").unlink()  # as if it had been stopped
    with pytest.raises(PlanError, match="--optimizer: 'adamw-8bit' when it began, 'adamw' now"):
        train(validate(TrainSettings, {"resume": report.run, "optimizer": "adamw"}))
