"""Makes the corpus beside it: `python tests/hostile/make.py`. Large files are made by tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path

HERE = Path(__file__).parent


def tensors(header: object, data: bytes = bytes(8), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = b'{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
CORPUS: dict[str, bytes] = {
    "safetensors/overlap": tensors({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}),
    "safetensors/hole": tensors({"a": entry([1], 4, 8)}),
    "safetensors/rest": tensors({"a": entry([1], 0, 4)}),
    "safetensors/beyond": tensors({"a": entry([4], 0, 16)}),
    "safetensors/backwards": tensors({"a": entry([2], 8, 0)}),
    "safetensors/negative": tensors({"a": entry([-2], -8, 0)}),
    "safetensors/truth": tensors({"a": entry([True, 2], False, 8)}),
    "safetensors/half": tensors({"a": entry([2.0], 0, 8)}),  # type: ignore[list-item]
    "safetensors/twice": tensors(b'{"a": ' + ONE + b', "a": ' + ONE + b"}"),
    "safetensors/dtype": tensors({"a": entry([2], 0, 8, "O")}),
    "safetensors/overflow": tensors({"a": entry([2**33, 2**33], 0, 8)}),
    "safetensors/empty-and-vast": tensors({"a": entry([0, 2**62], 0, 0)}, b""),
    "safetensors/axes": tensors({"a": entry([1] * 65, 0, 4)}, bytes(4)),
    "safetensors/digits": tensors(b'{"a": ' + b"9" * 5000 + b"}"),
    "safetensors/deep": tensors(b'{"a":' * 3000),
    "safetensors/length": tensors({}, length=1 << 63),
    "safetensors/short": b"\x08\0\0",
    "safetensors/list": tensors([]),
    "safetensors/utf-16": tensors('{"a": 1}'.encode("utf-16")),
    "jsonl/deep": b'{"text": ' + b"[" * 3000,
    "jsonl/digits": b'{"text": ' + b"1" * 5000 + b"}",
    "jsonl/surrogate": b'{"text": "\\ud800"}',
    "jsonl/not-utf-8": b'{"text": "\xff"}',
    "jsonl/twice": b'{"text": "a", "text": "b"}',
    "jsonl/nan": b'{"text": NaN}',
    "jsonl/nul": b"\0\0\0",
    "catalog/deep": b"a = " + b"[" * 3000,
    "catalog/tables": b"plugin = 1\nbundle = {}\n",
    "catalog/date": b"[[plugin]]\nid = 2024-02-31\n",
    "manifest/deep": b"id = " + b"{a=" * 2000,
    "manifest/nan": b'id = "x"\npriority = nan\n',
    "vox_toml/deep": b"[train]\nlr = " + b"[" * 3000,
    "vox_toml/not-utf-8": b"[train]\nmodel = '\xff'\n",
    "vox_toml/infinite": b"[train]\nlr = inf\n",
    "template/times": b"{{ 'a' * 10**10 }}",
    "template/loops": b"{% for i in range(99999) %}{% for j in range(99999) %}"
    b"{% endfor %}{% endfor %}",
    "template/doubling": b"{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    b"{% set n.x = n.x ~ n.x %}{% endfor %}",
    "template/escape": b"{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "template/recursion": b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "config/auto_map": b'{"model_type": "llama", "auto_map": {"AutoModel": "m.M"}}',
    "config/nested": b'{"model_type": "llama", "a": [{"auto_map": {}}]}',
    "config/internal": b'{"model_type": "llama", "_attn_implementation_internal": "evil/k"}',
    "config/deep": b'{"model_type": "llama", "a": ' + b"[" * 100 + b"]" * 100 + b"}",
    "config/type": b'{"model_type": "../../evil"}',
    "config/list": b"[]",
}  # fmt: skip


def main() -> None:
    for name, content in CORPUS.items():
        path = HERE / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
