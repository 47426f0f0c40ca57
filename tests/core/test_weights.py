"""Safetensors files: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from vox_core.cache import file_sha256
from vox_core.digests import folder_digest, tokenizer_digest
from vox_core.errors import ModelError, StorageError
from vox_core.weights import SafetensorsFile, WeightFolder, write_safetensors

BF16 = np.dtype(ml_dtypes.bfloat16)


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header, well-formed or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> Any:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "layer.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "layer.bias": rng.standard_normal(5).astype(np.float16),
        "count": np.array(7, np.int64),
        "none": np.zeros((0, 4), np.float32),
        "mask": np.array([True, False, True]),
    }


def test_a_file_of_the_library_reads_back(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        read = file.read(name)
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read, array)


def test_reading_maps_and_does_not_copy(tmp_path: Path) -> None:
    save_file({"a": np.arange(4, dtype=np.float32)}, tmp_path / "a.safetensors")
    read = SafetensorsFile(tmp_path / "a.safetensors").read("a")
    assert not read.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_small_floats_read_as_torch_reads_them(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    values = torch.linspace(-3, 3, 16)
    kinds = {
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }
    save_torch({name: values.to(kind) for name, kind in kinds.items()}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for name, kind in kinds.items():
        expected = values.to(kind).float().numpy()
        np.testing.assert_array_equal(file.read(name).astype(np.float32), expected)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "invalid offset for tensor `b`"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "invalid offset for tensor `b`"),
        ({"a": entry(4, 8)}, 8, "invalid offset for tensor `a`"),
        ({"a": entry(0, 8)}, 4, "file not fully covered"),
        ({"a": entry(0, 8)}, 12, "file not fully covered"),
        ({"a": entry(0, 8, shape=[3])}, 8, "invalid"),
        ({"a": entry(8, 0, shape=[2])}, 8, "invalid offset for tensor `a`"),
        ({"a": entry(0, 8, dtype="F4", shape=[16])}, 8, "found dtype F4, expected one of BOOL"),
        ({"a": {**entry(0, 8), "shape": [-2]}}, 8, "expected usize"),
        ({"a": {**entry(0, 8), "shape": [True]}}, 8, "expected usize"),
        ({"a": 7}, 0, "invalid type"),
        ({"__metadata__": {"format": 1}}, 0, "expected a string"),
        ([1], 0, "invalid type: sequence"),
        (b'{"a": 1, "a": 2}', 0, "invalid type"),
        (b'{"__metadata__": {"a": "1", "a": "2"}}', 0, "the key 'a' stands twice"),
        (b"{", 0, "invalid JSON"),
        (b"\xff\xfe", 0, "invalid UTF-8"),
        (b"[" * 100_000, 0, "invalid JSON"),
    ],
)
def test_a_corrupt_header_is_refused(tmp_path: Path, header: object, data: int, said: str) -> None:
    path = raw_file(tmp_path / "a.safetensors", header, bytes(data))
    with pytest.raises(ModelError) as caught:
        SafetensorsFile(path)
    assert caught.value.code == "VOX-M003"
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_null_metadata_is_read(tmp_path: Path) -> None:
    # As `mx.save_safetensors` writes a file without any.
    file = raw_file(tmp_path / "f", {"__metadata__": None, "x": entry(0, 4)}, b"\0" * 4)
    assert list(SafetensorsFile(file).tensors) == ["x"]


@pytest.mark.parametrize("length", [10, 100_000_001, 2**63])
def test_a_header_longer_than_the_file_is_refused_unread(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "a.safetensors", {}, length=length)
    with pytest.raises(ModelError, match="corrupt"):
        SafetensorsFile(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.arange(4, dtype=np.float32)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for end in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:end])
        with pytest.raises(ModelError, match="corrupt"):
            SafetensorsFile(tmp_path / "cut.safetensors")


# --- writing --------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["F32", "F16", "U8", "I64"]),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        max_size=5,
    )
)
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, specs: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    numpy_of = {"F32": "f4", "F16": "f2", "U8": "u1", "I64": "i8"}
    arrays = {
        name: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(numpy_of[dtype])
        for name, (dtype, shape) in specs.items()
    }
    path = tmp_path_factory.mktemp("w") / "a.safetensors"
    write_safetensors(path, specs, arrays.items())
    file = SafetensorsFile(path)
    # By name: tensors without elements share an offset, so their order in the file is open.
    assert set(file.tensors) == set(specs)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0
    for name, read in load_file(path).items():
        np.testing.assert_array_equal(read, arrays[name])
        np.testing.assert_array_equal(file.read(name), arrays[name])


def test_torch_loads_bfloat16(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    values = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    path = tmp_path / "a.safetensors"
    # Transposed: written in C order whatever the layout in memory.
    write_safetensors(path, {"a": ("BF16", (4, 3))}, [("a", values.astype(BF16).T)])
    loaded = load_torch(path)["a"]
    assert loaded.dtype == torch.bfloat16
    np.testing.assert_array_equal(loaded.float().numpy(), values.astype(BF16).astype("f4").T)


@pytest.mark.parametrize(
    "tensors",
    [
        [("b", np.zeros(2, np.float32)), ("a", np.zeros(2, np.float32))],
        [("a", np.zeros(2, np.float32))],
        [("a", np.zeros(3, np.float32)), ("b", np.zeros(2, np.float32))],
        [("a", np.zeros(2, np.float64)), ("b", np.zeros(2, np.float32))],
        [(name, np.zeros(2, np.float32)) for name in ("a", "b", "c")],
    ],
    ids=["order", "missing", "shape", "dtype", "surplus"],
)
def test_tensors_that_break_their_spec_leave_no_file(
    tmp_path: Path, tensors: list[tuple[str, np.ndarray]]
) -> None:
    specs = {"a": ("F32", (2,)), "b": ("F32", (2,))}
    with pytest.raises(ValueError, match="expected"):
        write_safetensors(tmp_path / "a.safetensors", specs, tensors)
    assert list(tmp_path.iterdir()) == []


# --- folders --------------------------------------------------------------------------------------


def sharded(folder: Path, weight_map: object, **shards: dict[str, np.ndarray]) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


ONE = np.ones(2, np.float32)


def test_a_single_file(tmp_path: Path) -> None:
    save_file({"a": ONE, "b": ONE * 2}, tmp_path / "model.safetensors")
    folder = WeightFolder(tmp_path)
    assert folder.files == ("model.safetensors",)
    assert folder.where["b"] == "model.safetensors"
    np.testing.assert_array_equal(folder.read("b"), ONE * 2)


def test_shards(tmp_path: Path) -> None:
    weight_map = {"a": "s2.safetensors", "b": "s1.safetensors"}
    folder = WeightFolder(sharded(tmp_path, weight_map, s1={"b": ONE}, s2={"a": ONE * 2}))
    assert folder.files == ("s1.safetensors", "s2.safetensors")
    assert list(folder.tensors) == ["b", "a"]
    np.testing.assert_array_equal(folder.read("a"), ONE * 2)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "s1.safetensors", "b": "s9.safetensors"}, ["shard s9.safetensors"]),
        ({"a": "s1.safetensors", "z": "s1.safetensors"}, ["tensor z: it is not in s1.safetensors"]),
        ({"z": "s1.safetensors", "b": "s9.safetensors"}, ["tensor z", "shard s9"]),
        ({"a": "../s1.safetensors"}, ["'../s1.safetensors' is not the name of a file here"]),
        ({"a": "/etc/x.safetensors"}, ["is not the name of a file here"]),
        ({"a": "x\\s1.safetensors"}, ["is not the name of a file here"]),
        ({"a": "s1.bin"}, ["is not the name of a file here"]),
        ({"a": 3}, ["is not the name of a file here"]),
        ({}, ["weight_map"]),
        ([], ["weight_map"]),
    ],
)
def test_a_faulty_index_is_refused(tmp_path: Path, weight_map: object, said: list[str]) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": ONE}, tmp_path / "s1.safetensors")  # what `../` would reach
    with pytest.raises(ModelError) as caught:
        WeightFolder(sharded(tmp_path / "model", weight_map, s1={"a": ONE}))
    assert caught.value.code == "VOX-M002"
    assert all(text in str(caught.value) for text in said)


def test_faults_of_all_shards_come_together(tmp_path: Path) -> None:
    weight_map = {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s3.safetensors"}
    sharded(tmp_path, weight_map, s1={"a": ONE}, s2={"b": ONE})
    for name in ("s1", "s2"):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError) as caught:
        WeightFolder(tmp_path)
    assert caught.value.code == "VOX-M003"
    said = "\n".join(caught.value.faults)
    assert all(f"{name}.safetensors" in said for name in ("s1", "s2", "s3"))


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError) as caught:
        WeightFolder(tmp_path)
    assert caught.value.code == "VOX-M005"
    assert "pytorch_model-00001-of-00002.bin" in str(caught.value)
    assert "save_pretrained" in caught.value.remedy


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        WeightFolder(tmp_path)
    assert caught.value.code == "VOX-M005"
    assert caught.value.found == "no weights"


# --- digests --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VOX_CACHE", str(root))
    return root


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    digests = []
    for name, value in (("x", 1), ("y", 1), ("z", 2)):
        (tmp_path / name).mkdir()
        save_file({"a": ONE * value}, tmp_path / name / "model.safetensors")
        digests.append(folder_digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_the_tokenizer_digest_sees_the_chat_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("one")
    before = tokenizer_digest(tmp_path)
    (tmp_path / "README.md").write_text("two")
    assert tokenizer_digest(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(tmp_path) != before


def test_a_large_file_is_hashed_once_and_again_when_it_changes(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(2 << 20))
    first = file_sha256(path)
    (kept,) = (cache / "digests").iterdir()
    kept.write_text(kept.read_text().replace(first, "f" * 64))
    assert file_sha256(path) == "f" * 64  # from the cache
    path.write_bytes(b"\1" + bytes(2 << 20))
    assert file_sha256(path) not in ("f" * 64, first)
    kept.write_text("[1]")
    assert len(file_sha256(path)) == 64  # a damaged entry is made anew


def test_a_file_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not be read"):
        file_sha256(tmp_path / "gone")
