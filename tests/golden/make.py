"""Writes the golden files of the chat templates: `python -m tests.golden.make [NAME...]`.

For each template a text that can be read (what is trained stands in ⟦ ⟧, with its weight if that is
not 1), and the tokens with their weights as JSON. Look at what changed before it is committed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from itertools import groupby
from pathlib import Path

from tests.core.data_samples import encode_one
from tests.golden.cases import CASES, record
from tests.golden.families import FAMILIES, RENDERED, tokenizer
from tests.malformed.make import EXPECTED
from vox_core import cache as caching
from vox_core.data.encode import Document, Encoder, serving_difference
from vox_core.data.render import Rendered, RenderError
from vox_core.data.rows import Record

SEQ_LEN = 100_000
CACHE_VERSION_FILE = Path(__file__).with_name("cache_version.json")


@cache
def encoder_of(name: str) -> Encoder:
    return Encoder(tokenizer(name), SEQ_LEN)


def readable(name: str) -> str:
    """Every case of a template, as text."""
    encoder = encoder_of(name)
    return "\n".join(f"=== {case}\n{_case(encoder, record(case))}\n" for case in CASES)


def tokens(name: str) -> str:
    """Tokens of every case that the template takes, and runs of [weight, tokens], as JSON."""
    encoder = encoder_of(name)
    found = {}
    for case in CASES:
        try:
            (document,) = encode_one(encoder, record(case)).documents
        except RenderError:
            continue
        found[case] = {"tokens": document.tokens_T.tolist(), "weights": _runs(document)}
    cases = (
        f"{json.dumps(case)}: {json.dumps(of, separators=(',', ':'))}" for case, of in found.items()
    )
    return "{\n" + ",\n".join(cases) + "\n}\n"


def _case(encoder: Encoder, row: Record) -> str:
    try:
        rendered = encoder.renderer.render(row)
    except RenderError as fault:
        return f"--- refused: {fault}"
    difference = serving_difference(encoder.renderer, row)
    return _marked(rendered) + (f"\n--- served otherwise: {difference}" if difference else "")


def _marked(rendered: Rendered) -> str:
    text, at = "", 0
    for span in rendered.spans:
        weight = "" if span.weight == 1 else f"{span.weight:g}|"
        text += f"{rendered.text[at : span.start]}⟦{weight}{rendered.text[span.start : span.stop]}⟧"
        at = span.stop
    return text + rendered.text[at:]


def _runs(document: Document) -> list[list[float]]:
    return [[weight, len(list(run))] for weight, run in groupby(document.weights_T.tolist())]


def digest() -> str:
    """SHA-256, in hex, of the golden tokens and of the diagnoses of malformed files."""
    sha256 = hashlib.sha256()
    for path in (*sorted(RENDERED.glob("*.json")), EXPECTED):
        content = path.read_bytes()
        sha256.update(f"{path.name}:{len(content)}:".encode())
        sha256.update(content)
    return sha256.hexdigest()


def hold_version() -> None:
    """Write the cache's version beside the digest of what it stands for."""
    found = {"version": caching.CACHE_VERSION, "sha256": digest()}
    if CACHE_VERSION_FILE.exists():
        held = json.loads(CACHE_VERSION_FILE.read_text(encoding="utf-8"))
        if held != found and held["version"] == found["version"]:
            sys.exit("tokens or diagnoses have changed: raise CACHE_VERSION in vox_core/cache.py")
    CACHE_VERSION_FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")


def main(names: list[str]) -> None:
    for name in names or FAMILIES:
        (RENDERED / f"{name}.txt").write_text(readable(name), encoding="utf-8")
        (RENDERED / f"{name}.json").write_text(tokens(name), encoding="utf-8")
    hold_version()


if __name__ == "__main__":
    main(sys.argv[1:])
