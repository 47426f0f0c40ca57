"""What reads somebody else's files never trips: an error of vox's own, within a second."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from tests.core.data_samples import load_records
from tests.fuzz.mutations import cases, json_values, looked_at, mutated
from tests.run.faulty import RUN, made_up
from vox_core.adapter.peft import read_adapter
from vox_core.catalog import read_catalogs
from vox_core.config import TrainSettings, load_settings, reading
from vox_core.host.manifest import parse_manifest
from vox_core.models.folder import check_folder
from vox_core.run import checkpoint
from vox_core.run.checkpoint import Origin
from vox_core.weights import SafetensorsFile, WeightFolder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# --- JSONL ----------------------------------------------------------------------------------------

ROWS = b"\n".join(
    json.dumps(row, ensure_ascii=False).encode()
    for row in (
        {"prompt": "How do I merge?", "completion": "vox merge RUN é"},
        {"text": "plain"},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "there"},
            ],
            "id": 7,
        },
    )
)


@cases()
@given(content=mutated(ROWS))
def test_jsonl(place: Path, content: bytes) -> None:
    (place / "rows.jsonl").write_bytes(content)
    looked_at(lambda: load_records([place / "rows.jsonl"]))


ROW_KEYS = [
    "messages",
    "prompt",
    "completion",
    "text",
    "role",
    "content",
    "type",
    "instruction",
    "x",
]
rows = st.recursive(
    json_values,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ROW_KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


@cases(0.5)
@given(value=rows)
def test_rows_of_any_shape(place: Path, value: Any) -> None:
    (place / "shapes.jsonl").write_text(json.dumps(value))
    looked_at(lambda: load_records([place / "shapes.jsonl"]))


# --- safetensors ----------------------------------------------------------------------------------

TENSORS = save(
    {"a": np.ones((2, 3), np.float32), "b": np.zeros((0, 4), np.int8), "c": np.ones(5, np.float16)},
    {"format": "pt"},
)
_LENGTH = struct.unpack("<Q", TENSORS[:8])[0]
HEADER, DATA = TENSORS[8 : 8 + _LENGTH], TENSORS[8 + _LENGTH :]


def read_all(path: Path) -> None:
    file = SafetensorsFile(path)
    for name in file.tensors:
        assert file.read(name).shape == file.tensors[name].shape


@cases(0.5)
@given(content=mutated(TENSORS))
def test_safetensors(place: Path, content: bytes) -> None:
    (place / "x.safetensors").write_bytes(content)
    looked_at(lambda: read_all(place / "x.safetensors"))


@cases()
@given(header=mutated(HEADER))
def test_safetensors_headers_of_the_right_length(place: Path, header: bytes) -> None:
    (place / "y.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + DATA)
    looked_at(lambda: read_all(place / "y.safetensors"))


sizes = st.integers(0, 40) | st.sampled_from([2**31, 2**62, 2**64, -1])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F4", "", "I64"]),
        "shape": st.lists(sizes, max_size=40),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)


@cases(0.5)
@given(header=st.dictionaries(st.text(max_size=4), entries | json_values, max_size=4))
def test_safetensors_headers_of_any_numbers(place: Path, header: dict[str, Any]) -> None:
    raw = json.dumps(header).encode()
    (place / "z.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + DATA)
    looked_at(lambda: read_all(place / "z.safetensors"))


@cases(0.5)
@given(index=mutated(b'{"metadata": {"total_size": 38}, "weight_map": {"a": "1.safetensors"}}'))
def test_indices_of_shards(place: Path, index: bytes) -> None:
    folder = place / "shards"
    folder.mkdir(exist_ok=True)
    (folder / "1.safetensors").write_bytes(TENSORS)
    (folder / "model.safetensors.index.json").write_bytes(index)
    looked_at(lambda: WeightFolder(folder))


# --- TOML -----------------------------------------------------------------------------------------

CATALOG = (ROOT / "catalog.toml").read_bytes()
MANIFESTS = [
    (ROOT / path).read_bytes()
    for path in (
        "plugins/vox_cpu/vox_cpu/vox_plugin.toml",
        "plugins/vox_mlx/vox_mlx/vox_plugin.toml",
        "examples/vox_float64/vox_float64/vox_plugin.toml",
        "examples/vox_numpy/vox_numpy/vox_plugin.toml",
    )
]
VOX_TOML = b"""[train]
model = "smollm2-135m"
data = ["train.jsonl"]
lr = 2e-4
rank = 16
method = "dora"
schedule = "cosine"
max-steps = 10

[generate]
temperature = 0.5

[plugin]
"""


@cases()
@given(content=mutated(CATALOG))
def test_catalog(place: Path, content: bytes) -> None:
    (place / "catalog.toml").write_bytes(content)
    looked_at(lambda: read_catalogs([place / "catalog.toml"]))


@cases()
@given(content=mutated(*MANIFESTS))
def test_manifest(content: bytes) -> None:
    looked_at(lambda: parse_manifest(content.decode("utf-8", "replace"), "vox_plugin.toml"))


@cases()
@given(content=mutated(VOX_TOML))
def test_vox_toml(place: Path, content: bytes) -> None:
    (place / "vox.toml").write_bytes(content)
    with reading(place / "vox.toml"):
        looked_at(lambda: load_settings(TrainSettings, {}))


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step(place: Path) -> Path:
    (place / "run").mkdir()
    return checkpoint.save(place / "run" / "checkpoints", made_up(3, wide=8), Origin(**RUN))


@pytest.fixture(scope="module")
def whole(step: Path) -> dict[str, bytes]:
    return {name: (step / name).read_bytes() for name in (*checkpoint.FILES, checkpoint.MANIFEST)}


@cases()
@given(
    data=st.data(),
    name=st.sampled_from([*checkpoint.FILES, checkpoint.MANIFEST]),
    sign=st.booleans(),
)
def test_checkpoint(
    step: Path, whole: dict[str, bytes], data: st.DataObject, name: str, sign: bool
) -> None:
    """Any file changed; if it is signed, with a manifest that says it should be so."""
    changed = data.draw(mutated(whole[name]))
    contents = {**whole, name: changed}
    if sign and name != checkpoint.MANIFEST:
        entries = json.loads(whole[checkpoint.MANIFEST])
        digest = hashlib.sha256(changed).hexdigest()
        entries["files"][name] = {"size": len(changed), "sha256": digest}
        contents[checkpoint.MANIFEST] = json.dumps(entries).encode()
    for file, content in contents.items():
        (step / file).write_bytes(content)
    looked_at(lambda: checkpoint.load(step))


# --- folders --------------------------------------------------------------------------------------

CONFIG = b'{"model_type": "llama", "hidden_size": 32, "text_config": {"a": [1, {"b": null}]}}'
ADAPTER = json.dumps(
    {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "alpha_pattern": {"a.b": 8},
        "rank_pattern": {},
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
    }
).encode()


@cases(0.5)
@given(content=mutated(CONFIG), name=st.sampled_from(["config.json", "tokenizer_config.json"]))
def test_model_folder(place: Path, content: bytes, name: str) -> None:
    folder = place / "model"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(TENSORS)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_bytes(CONFIG)
    (folder / name).write_bytes(content)
    looked_at(lambda: check_folder(folder))
    (folder / name).unlink()


@cases(0.5)
@given(content=mutated(ADAPTER))
def test_adapter_folder(place: Path, content: bytes) -> None:
    folder = place / "adapter"
    folder.mkdir(exist_ok=True)
    pair = {"A": np.ones((2, 4), np.float32), "B": np.ones((4, 2), np.float32)}
    named = {f"base_model.model.a.b.lora_{half}.weight": value for half, value in pair.items()}
    (folder / "adapter_model.safetensors").write_bytes(save(named))
    (folder / "adapter_config.json").write_bytes(content)
    looked_at(lambda: read_adapter(folder))
