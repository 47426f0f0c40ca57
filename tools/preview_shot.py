"""Writes docs/preview.png: `vox data preview --html` in a Chromium that is on the path.

    python tools/preview_shot.py

The model is the embedded default one; the rows are below.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser import chromium
from vox_core.config import TrainSettings, validate
from vox_data.preview import preview

OUT = Path(__file__).resolve().parents[1] / "docs" / "preview.png"
ROWS = [
    {
        "messages": [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "Why is the sky blue?"},
            {"role": "assistant", "content": "Air scatters blue light more than red light."},
            {"role": "user", "content": "And in the evening?"},
            {"role": "assistant", "content": "Then most of the blue is gone on the long way."},
        ]
    },
    {"prompt": "Translate to German: The cat sleeps.", "completion": "Die Katze schläft."},
    {"prompt": "Count to a hundred.", "completion": ", ".join(map(str, range(1, 101)))},
]


def main() -> None:
    program = chromium.find()
    assert program, "no Chromium is on the path"
    with tempfile.TemporaryDirectory() as folder:
        data, page = Path(folder) / "train.jsonl", Path(folder) / "page.html"
        data.write_text("\n".join(map(json.dumps, ROWS)))
        asked = {"data": [data], "seq_len": 96}
        preview(validate(TrainSettings, asked), html=page)
        page.write_text(page.read_text().replace(f"{folder}/", ""))
        with chromium.Page(program, Path(folder) / "profile", 920, 1240) as browser:
            browser.open(page.as_uri())
            browser.wait("document.querySelectorAll('article pre > *').length > 50")
            shot = browser.screenshot()
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    image.quantize(64).save(OUT, optimize=True)
    print(f"{OUT}: {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
