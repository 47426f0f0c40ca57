"""Under what reads foreign folders: JSON within limits, links, keys that name code."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from vox_core import bounded_json, files
from vox_core.bounded_json import JsonFault
from vox_core.errors import ModelError
from vox_core.models.folder import code_keys
from vox_core.weights import WeightFolder


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (nested(bounded_json.MAX_DEPTH + 2).encode(), "deep"),
        (nested(100_000).encode(), "deep"),
        (b"1" * 5000, "digits"),
        (b"\xff", "decode"),
        (b"", "Expecting"),
        (b" " * 101, "100 bytes"),
        (b'{"a": 1, "a": 2}', "twice"),
    ],
)
def test_json_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    if said == "100 bytes":
        monkeypatch.setattr(bounded_json, "MAX_BYTES", 100)
    with pytest.raises(JsonFault, match=said):
        bounded_json.read(path, unique=True)


def test_json_that_can(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(nested(bounded_json.MAX_DEPTH))
    bounded_json.read(path)
    path.write_text('{"a": 1, "a": [2]}')
    assert bounded_json.read(path) == {"a": [2]}


def test_a_repeated_key_is_found_at_once_among_many() -> None:
    raw = json.dumps({f"k{n}": n for n in range(100_000)})[:-1] + ', "k99999": 1}'
    before = time.process_time()
    with pytest.raises(JsonFault, match="k99999"):
        bounded_json.parse(raw.encode(), unique=True)
    assert time.process_time() - before < 1


def test_links_within_a_folder_are_no_strays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a").write_text("x")
    (tmp_path / "model/b").symlink_to("a")
    (tmp_path / "link").symlink_to("model")
    assert files.strays(tmp_path / "model") == files.strays(tmp_path / "link") == []
    for target in ("../secret", "/etc/hostname", "nowhere/../../x", str(tmp_path)):
        (tmp_path / "model/c").symlink_to(target)
        (said,) = files.strays(tmp_path / "model")
        assert said.startswith("c: a link to ")
        (tmp_path / "model/c").unlink()


HARMLESS: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"_attn_implementation": "sdpa", "attn_implementation": None}),
    ("config.json", {"_attn_implementation_autoset": True, "model_type": "llama"}),
    ("config.json", {"attn_implementation": {"": "eager", "text_config": "sdpa"}}),
    ("config.json", {"quantization_config": {"bits": 4, "group_size": 64, "mode": "affine"}}),
    ("config.json", {"transformers_weights": None, "configuration_files": []}),
    ("tokenizer_config.json", {"tokenizer_file": "/root/.cache/x", "vocab_file": None}),
    ("tokenizer_config.json", {"special_tokens_map_file": "/x/y", "vocab_file": "vocab.json"}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "document"), HARMLESS)
def test_what_real_repositories_have_is_no_code(file: str, document: dict[str, Any]) -> None:
    assert list(code_keys(document, file)) == []


def test_a_shard_of_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "a" * 5000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        WeightFolder(tmp_path)
    assert "it is not in the folder" in str(caught.value.faults)
