"""A folder that plugins are installed into: real packages with real metadata, written by hand."""

from __future__ import annotations

from pathlib import Path

from vox_core.host.discover import Found, discover

MANIFEST = """
id = "{id}"
name = "{id}"
version = "0.1.0"
api = "{api}"
licence = "MIT"
priority = 1000000
[capabilities]
devices = ["cpu"]
quantisations = ["none"]
dtypes = ["fp32"]
methods = ["lora"]
families = "*"
[probe]
file = "probe.py"
"""
PROBE = 'print(\'{"present": true, "devices": [{"name": "c", "tag": "cpu"}], "detail": "a CPU"}\')'
WORKS = """
from vox_core.contract import AdapterState, MergeResult, RowByRow, Trainer, TrainState
from vox_core.hookspecs import hookimpl

class Loaded(RowByRow):
    def add_adapter(self, name, adapter):
        pass
    def remove_adapter(self, name):
        pass
    def log_probs(self, batch, adapter=None, seed=None):
        return batch
    def logits(self, tokens_T, adapter=None, first=0):
        return tokens_T
    def close(self):
        pass

class Learning(Loaded, Trainer):
    def add_learner(self, name, state):
        pass
    def remove_learner(self, name):
        pass
    def accumulate(self, batch, seed, learner, weigh=None):
        return batch
    def update(self, update, learner):
        return 0.5
    def discard(self, learner):
        pass
    def state(self, learner):
        return TrainState(7, AdapterState("lora", {}))

class Backend:
    @hookimpl
    def vox_train(self, job, context):
        return Learning()
    @hookimpl
    def vox_merge(self, job, context):
        return MergeResult(iter([("w", 1)]))
    @hookimpl
    def vox_load(self, job, context):
        return Loaded()

backend = Backend()
"""


class Site:
    """A folder of installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        id: str,
        body: str = WORKS,
        manifest: str | None = MANIFEST,
        distribution: str | None = None,
        package: str | None = None,
        into: Path | None = None,
        api: str = "2.0",
    ) -> str:
        """Install a plugin; its package goes `into` another folder for an editable install."""
        distribution, package = distribution or f"vox-x-{id}", package or f"vox_x_{id}"
        code = (into or self.folder) / package.replace(".", "/")
        code.mkdir(parents=True)
        (code / "__init__.py").write_text(body)
        (code / "probe.py").write_text(PROBE)
        if manifest is not None:
            (code / "vox_plugin.toml").write_text(manifest.format(id=id, api=api))
        info = self.describe(distribution, f"[vox_core.plugins]\n{id} = {package}:backend\n")
        recorded = [*info.iterdir(), info / "RECORD", *([] if into else code.iterdir())]
        lines = [f"{file.relative_to(self.folder)},,\n" for file in recorded]
        (info / "RECORD").write_text("".join(lines))
        return package

    def describe(self, distribution: str, entry_points: str, version: str = "0.1.0") -> Path:
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(entry_points)
        return info

    def found(self, id: str) -> Found:
        (plugin,) = [plugin for plugin in discover([str(self.folder)]) if plugin.id == id]
        return plugin
