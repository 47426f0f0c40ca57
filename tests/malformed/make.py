"""Some fifty data files that are wrong, one for each way in which data go wrong.

    python -m tests.malformed.make FOLDER     writes them
    python -m tests.malformed.make            writes expected.json, to be read before it is kept

A few bytes each, so none of them is checked in; expected.json has the diagnosis of each, in full.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

EXPECTED = Path(__file__).with_name("expected.json")
GOOD = b'{"prompt": "a", "completion": "b"}\n'


def lines(*rows: bytes | object) -> bytes:
    """Good rows around the bad one, so that the number of its line is told."""
    written = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    return GOOD + b"".join(line + b"\n" for line in written) + GOOD


def said(*turns: object) -> dict[str, object]:
    return {"messages": list(turns)}


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def zipped(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
MANY = GOOD * 20


def cases() -> dict[str, bytes]:
    """Name of a file -> what is in it."""
    return {
        "comma.jsonl": lines(b'{"text": "a" "b"}'),
        "cut-off.jsonl": lines(b'{"text": "a')[: -len(GOOD)],
        "two-on-a-line.jsonl": lines(b'{"text": "a"} {"text": "b"}'),
        "latin-1.jsonl": lines(b'{"text": "caf\xe9"}'),
        "nan.jsonl": lines(b'{"text": "a", "rating": NaN}'),
        "key-twice.jsonl": lines(b'{"text": "a", "text": "b"}'),
        "surrogate.jsonl": lines(b'{"text": "\\ud83d"}'),
        "array.jsonl": b'[{"text": "a"}]',
        "table.jsonl": b"prompt,completion\na,b\n",
        "null-bytes.jsonl": lines(b'{"text": "a\x00b"}'),
        "unknown.jsonl": lines({"query": "a", "reply": "b"}),
        "misspelt.jsonl": lines({"messages": [USER, ANSWER], "promt": "x"}),
        "several-forms.jsonl": lines({"instruction": "a", "output": "b", "text": "c"}),
        "no-answer.jsonl": lines({"prompt": "a"}),
        "empty-answer.jsonl": lines({"prompt": "a", "completion": " "}),
        "number.jsonl": lines({"prompt": "a", "completion": 3}),
        "role.jsonl": lines(said({"role": "human", "content": "q"}, ANSWER)),
        "order.jsonl": lines(said(USER, {"role": "system", "content": "s"}, ANSWER)),
        "no-assistant.jsonl": lines(said(USER)),
        "image.jsonl": lines(
            said({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ANSWER)
        ),
        "speaker.jsonl": lines({"conversations": [{"from": "gpt4", "value": "a"}]}),
        "value.jsonl": lines({"conversations": [{"from": "gpt", "text": "a"}]}),
        "half-a-pair.jsonl": lines({"prompt": "a", "chosen": "b"}),
        "same-pair.jsonl": lines({"prompt": "a", "chosen": "b", "rejected": "b"}),
        "rating.jsonl": lines({"prompt": "a", "response": "b", "rating": "good", "tags": "x"}),
        "tools.jsonl": lines({"messages": [USER, ANSWER], "tools": "[3]"}),
        "many.jsonl": lines({"txt": 1}, {"text": ""}, b"{", [1]),
        "empty.jsonl": b"\n\n",
        "torn.jsonl.gz": gzip.compress(MANY, mtime=0)[:-20],
        "not-gzip.jsonl.gz": GOOD,
        "torn.jsonl.zst": zstd(MANY)[:-10],
        "damaged.jsonl.zst": damaged(zstd(MANY), -2),
        "element.json": b'[{"text": "a"}, {"text": }, {"text": "c"}, 7]',
        "not-closed.json": b'{"rows": [{"text": "a"}, {"text": "b"}',
        "two-lists.json": b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}',
        "trailing.json": b'[{"text": "a"},]',
        "ragged.csv": b"prompt,completion\na,b\na,b,c\na\n",
        "quotes.csv": b'prompt,completion\n"a" x,b\na,b\n',
        "semicolons.csv": b"prompt;completion\na;b\n",
        "tabs.csv": b"prompt\tcompletion\na\tb\n",
        "commas.tsv": b"prompt,completion\na,b\n",
        "latin-1.csv": "prompt,completion\ncafé,b\na,b\n".encode("latin-1"),
        "windows-1252.csv": "name,prompt,completion\n“a”,b,c\n".encode("windows-1252"),
        "columns-twice.csv": b"prompt,prompt,completion\na,b,c\n",
        "cell.tsv": b'messages\trating\n[{"role": user}]\t\n[]\thigh\n',
        "utf-16.jsonl": '{"text": "a"}\n'.encode("utf-16"),
        "gzip.jsonl": gzip.compress(GOOD, mtime=0),
        "zip.jsonl": b"PK\x03\x04" + bytes(range(256)),
        "utf-16.json": '[{"text": "a"}]'.encode("utf-16"),
        "gzip.csv": gzip.compress(b"text\na\n", mtime=0),
        "one-byte.jsonl": '{"text": "日本"}\n'.encode() + b'{"text": "caf\xc3"}\n',
        "utf-16.csv": "prompt,completion\na,b\n".encode("utf-16"),
        "numbers.parquet": parquet(pa.table({"text": [1, 2]})),
        "binary.parquet": parquet(pa.table({"text": [b"\xff\xfe"], "id": [1]})),
        "not.parquet": GOOD,
        "table.xlsx": zipped("xl/workbook.xml", b"<workbook/>"),
        "table.xls": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504),
    }


def main(folder: str | None) -> None:
    if folder is None:
        from tests.malformed.test_malformed import diagnoses

        EXPECTED.write_text(json.dumps(diagnoses(), indent=2, ensure_ascii=False) + "\n")
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, data in cases().items():
        (Path(folder) / name).write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
