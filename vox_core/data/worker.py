"""A process that tokenises blocks for another (`parts.py`): `python -m vox_core.data.worker JSON`.

It says "ready", then answers each line of JSON on stdin with one on stdout; the arrays of the part
are in the scratch folder by then. It ends with its stdin. What cannot be answered ends it too: the
process that asked does the block itself, and meets the error where it can be told.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from vox_core.data.blocks import Block
from vox_core.data.encode import Encoder
from vox_core.data.parts import make_part, quick_collections, save
from vox_core.data.tokenizer import load_tokenizer


def main() -> None:
    request: dict[str, Any] = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        sys.modules["torch"] = cast(Any, None)  # transformers would import it, for three seconds
        tokenizer = load_tokenizer(Path(request["model"]))
        encoder = Encoder(tokenizer, request["seq_len"], quick=request["quick"])
        print("ready", file=answers, flush=True)
        with quick_collections():
            for line in sys.stdin:
                print(_answer(encoder, json.loads(line), request), file=answers, flush=True)


def _answer(encoder: Encoder, asked: dict[str, Any], request: dict[str, Any]) -> str:
    block = Block(**{**asked["block"], "path": Path(asked["block"]["path"])})
    part = make_part(encoder, block)
    save(part.columns, Path(request["scratch"]), asked["number"])
    found = ("rows", "answers", "dropped", "truncated", "faults")
    counts = {name: getattr(part, name) for name in found}
    return json.dumps({**counts, "observed": part.observed.to_json()})


if __name__ == "__main__":
    main()
