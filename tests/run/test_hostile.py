"""Hostile models and adapters: refused in words that say why, and nothing is written or run.

Each attack is made on a copy of a real tiny model or adapter, trained or located as a user would,
with a snapshot of everything around the run folder before and after.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vox_core.adapter.peft import write_adapter
from vox_core.contract import AdapterState, LowRank
from vox_core.data import worker
from vox_core.errors import VoxError
from vox_core.run.reference import resolve_reference
from vox_core.run.train import train
from vox_testing.tiny import CHATML

Attack = Callable[[Path, Path], None]


class WritesWhenLoaded:
    """A pickle of this writes a file beside the user's home when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return (open, (self.target, "w"))


def snapshot(root: Path, *without: Path) -> dict[str, object]:
    """Path -> what lies there, of everything under `root` but what is under `without`."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        if any(path.is_relative_to(left_out) for left_out in without):
            continue
        if path.is_symlink():
            found[str(path)] = path.readlink()
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[str(path)] = "folder"
    return found


def edit(path: Path, **keys: object) -> None:
    document = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**document, **keys}))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home, caches and current folder of the test's own, with a secret outside the model."""
    root = tmp_path / "world"
    for name in ("home", "cache", "outside"):
        (root / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("VOX_CACHE", str(root / "cache"))
    monkeypatch.setenv("HF_HOME", str(root / "home/hf"))
    monkeypatch.chdir(root)
    save_file({"a": np.ones(4, np.float32)}, root / "outside/other.safetensors")
    (root / "outside/secret.json").write_text('{"model_type": "llama", "secret": "s3cret"}')
    return root


# --- models ---------------------------------------------------------------------------------------


def shards(folder: Path, file: str) -> None:
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def traversal(folder: Path, outside: Path) -> None:
    shards(folder, "../world/outside/other.safetensors")


def absolute(folder: Path, outside: Path) -> None:
    shards(folder, str(outside / "other.safetensors"))


def linked_weights(folder: Path, outside: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(outside / "other.safetensors")


def linked_config(folder: Path, outside: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(os.path.relpath(outside / "secret.json", folder))


def linked_templates(folder: Path, outside: Path) -> None:
    (folder / "additional_chat_templates").symlink_to(outside)


def giant_header(folder: Path, outside: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + raw[8:])


def deep_header(folder: Path, outside: Path) -> None:
    header = b'{"a":' * 100_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def deep_config(folder: Path, outside: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "llama", "a": ' + "[" * 200 + "]" * 200 + "}"
    )


def looping_template(folder: Path, outside: Path) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    edit(folder / "tokenizer_config.json", chat_template=loops + CHATML)


def growing_template(folder: Path, outside: Path) -> None:
    """Only at the third message, which no probe has."""
    grows = "{% if messages | length > 2 %}{{ 'a' * 10**10 }}{% endif %}"
    (folder / "chat_template.jinja").write_text(grows + CHATML)


def auto_map(folder: Path, outside: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(outside / 'ran')!r}, 'w')\nclass Model: pass\n")
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})


def tokenizer_code(folder: Path, outside: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(outside / 'ran')!r}, 'w')\nclass T: pass\n")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})


def only_pickles(folder: Path, outside: Path) -> None:
    (folder / "model.safetensors").unlink()
    evil = pickle.dumps(WritesWhenLoaded(outside / "ran"))
    (folder / "pytorch_model.bin").write_bytes(evil)


def adapter_in_model(folder: Path, outside: Path) -> None:
    edit(folder / "adapter_config.json", base_model_name_or_path=str(outside), peft_type="LORA")


def key(file: str, **keys: object) -> Attack:
    return lambda folder, outside: edit(folder / file, **keys)


MODELS: dict[str, tuple[Attack, str]] = {
    "traversal": (traversal, "M002"),
    "absolute": (absolute, "M002"),
    "linked weights": (linked_weights, "M002"),
    "linked config": (linked_config, "M002"),
    "linked templates": (linked_templates, "M002"),
    "giant header": (giant_header, "M003"),
    "deep header": (deep_header, "M003"),
    "deep config": (deep_config, "M002"),
    "looping template": (looping_template, "D005"),
    "growing template": (growing_template, "D005"),
    "auto_map": (auto_map, "M004"),
    "tokenizer code": (tokenizer_code, "M004"),
    "only pickles": (only_pickles, "M005"),
    "adapter in the model": (adapter_in_model, "M002"),
    "internal kernel": (key("config.json", _attn_implementation_internal="evil/k"), "M004"),
    "kernel": (key("config.json", attn_implementation="evil/kernel:run"), "M004"),
    "kernel of a part": (
        key("config.json", _attn_implementation={"": "sdpa", "text_config": "evil/k"}),
        "M004",
    ),
    "experts": (key("config.json", experts_implementation="evil/k"), "M004"),
    "other configuration": (key("config.json", configuration_files=["config.4.0.0.json"]), "M004"),
    "other weights": (key("config.json", transformers_weights="pytorch_model.bin"), "M004"),
    "mlx module": (key("config.json", model_file="evil.py"), "M004"),
    "quantiser": (key("config.json", quantization_config={"kernel": "evil/k"}), "M004"),
    "model type": (key("config.json", model_type="../../evil"), "M002"),
    "generation": (key("generation_config.json", custom_generate="evil/generate"), "M004"),
    "vocabulary": (key("tokenizer_config.json", vocab_file="/etc/passwd"), "M004"),
    "other tokenizer": (
        key("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.4.0.0.json"]),
        "M004",
    ),
    "tokenizer by special tokens": (
        key("special_tokens_map.json", tokenizer_file="/etc/passwd"),
        "M004",
    ),
    "processor": (key("processor_config.json", auto_map={"AutoProcessor": "evil.P"}), "M004"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_model_is_refused(name, world, tiny, settings, data, monkeypatch):
    attack, code = MODELS[name]
    if name == "looping template":
        monkeypatch.setattr(worker, "SECONDS", 0.5)
    rows = [[{"role": role, "content": "x"} for role in ("user", "assistant") * 2]]
    (data / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    model = world / "model"
    shutil.copytree(tiny("llama"), model)
    attack(model, world / "outside")
    before = snapshot(world, world / "cache")
    with pytest.raises(VoxError) as caught:
        train(settings(model, out=world / "run"))
    assert caught.value.code == f"VOX-{code}", caught.value
    assert "s3cret" not in str(caught.value)
    assert caught.value.remedy and caught.value.where
    assert snapshot(world, world / "cache") == before
    assert not [p for p in (world / "cache").rglob("*") if p.is_symlink()]


def test_pickles_beside_safetensors_are_never_opened(world, tiny, settings):
    model = world / "model"
    shutil.copytree(tiny("llama"), model)
    evil = pickle.dumps(WritesWhenLoaded(world / "outside/ran"))
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pkl", "x.ckpt"):
        (model / name).write_bytes(evil)
        (model / name).chmod(0)
    run = world / "run"
    before = snapshot(world, world / "cache", run, model)
    train(settings(model, out=run, max_steps=1))
    assert snapshot(world, world / "cache", run, model) == before
    assert not (world / "outside/ran").exists()
    assert not [*run.rglob("*.bin"), *run.rglob("*.p*k*l")]


def test_a_snapshot_in_the_hubs_cache_is_a_model(world, tiny, settings):
    """The hub lays it out as links into its blobs, some of them into those shared by all."""
    hub = world / "home/hf/hub"
    repository = hub / "models--owner--name"
    commit = repository / "snapshots" / ("c" * 40)
    commit.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (hub / "blobs").mkdir()
    for number, file in enumerate(sorted(tiny("llama").iterdir())):
        blob = repository / "blobs" / f"{number:040}"
        if number % 2:
            shutil.copy(file, hub / "blobs" / f"{number:064}")
            blob.symlink_to(f"../../blobs/{number:064}")
        else:
            shutil.copy(file, blob)
        (commit / file.name).symlink_to(f"../../blobs/{number:040}")
    train(settings(commit, out=world / "run", max_steps=1))
    (commit / "config.json").unlink()
    (commit / "config.json").symlink_to(world / "outside/secret.json")
    with pytest.raises(VoxError) as caught:
        train(settings(commit, out=world / "run2", max_steps=1))
    assert caught.value.code == "VOX-M002"


# --- adapters -------------------------------------------------------------------------------------


def linked_adapter(folder: Path, outside: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(outside / "other.safetensors")


def linked_adapter_config(folder: Path, outside: Path) -> None:
    (folder / "adapter_config.json").rename(outside / "adapter_config.json")
    (folder / "adapter_config.json").symlink_to(outside / "adapter_config.json")


def giant_adapter(folder: Path, outside: Path) -> None:
    raw = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + raw[8:])


def pickled_adapter(folder: Path, outside: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    evil = pickle.dumps(WritesWhenLoaded(outside / "ran"))
    (folder / "adapter_model.bin").write_bytes(evil)


def traversing_names(folder: Path, outside: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("model.layers", "../../outside"): v for name, v in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")


ADAPTERS: dict[str, tuple[Attack, str]] = {
    "linked": (linked_adapter, "A001"),
    "linked config": (linked_adapter_config, "A001"),
    "giant header": (giant_adapter, "M003"),
    "pickle": (pickled_adapter, "A001"),
    "names": (traversing_names, "A002"),
    "deep": (
        lambda folder, outside: (folder / "adapter_config.json").write_text("[" * 9999) and None,
        "A001",
    ),
    "slow pattern": (key("adapter_config.json", alpha_pattern={"(a+)+$": 1}), "A001"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_hostile_adapter_is_refused(name, world, tiny):
    attack, code = ADAPTERS[name]
    model = world / "model"
    shutil.copytree(tiny("llama"), model)
    source = resolve_reference(str(model))
    path = next(path for path in source.modules if path.endswith("q_proj"))
    shape = source.modules[path]
    pair = LowRank(
        np.ones((2, shape.in_features), np.float32), np.ones((shape.out_features, 2), np.float32), 4
    )
    adapter = world / "adapter"
    adapter.mkdir()
    state = AdapterState("lora", {path: pair}, {})
    write_adapter(adapter, state, base=str(model), modules=source.modules)
    assert resolve_reference(str(adapter)).adapter is not None
    attack(adapter, world / "outside")
    before = snapshot(world, world / "cache")
    with pytest.raises(VoxError) as caught:
        resolve_reference(str(adapter))
    assert caught.value.code == f"VOX-{code}", caught.value
    assert caught.value.remedy and caught.value.where
    assert snapshot(world, world / "cache") == before
