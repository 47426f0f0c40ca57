"""Writes the screenshots of the guide, by a Chromium that is on the path.

    python tools/page_shots.py preview    docs/preview.png: `vox data preview --html`
    python tools/page_shots.py serve RUN  docs/serve.png: the page of `vox serve`

The preview is of the embedded default model and the rows below. RUN is that of `vox quickstart`.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from PIL import Image

from tests.browser import chromium
from vox_core.config import TrainSettings, validate
from vox_data.preview import preview

DOCS = Path(__file__).resolve().parents[1] / "docs"
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
QUESTION = "How do I resume a run?"


def main(what: str, *arguments: str) -> None:
    program = chromium.find()
    assert program, "no Chromium is on the path"
    with tempfile.TemporaryDirectory() as folder:
        {"preview": shoot_preview, "serve": shoot_serve}[what](program, Path(folder), *arguments)


def shoot_preview(program: str, folder: Path) -> None:
    data, page = folder / "train.jsonl", folder / "page.html"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    asked = {"data": [data], "seq_len": 96}
    preview(validate(TrainSettings, asked), html=page)
    page.write_text(page.read_text().replace(f"{folder}/", ""))
    with chromium.Page(program, folder / "profile", 920, 1240) as browser:
        browser.open(page.as_uri())
        browser.wait("document.querySelectorAll('article pre > *').length > 50")
        save(browser.screenshot(), DOCS / "preview.png")


def shoot_serve(program: str, folder: Path, run: str) -> None:
    """Screenshot a question to a run and its base, greedy, with probabilities where they differ."""
    named = ("--name", f"vox-help={run}", "--port", "0")
    serving = [sys.executable, "-m", "vox_core.cli", "serve", *named]
    server = subprocess.Popen(serving, stdout=subprocess.PIPE, text=True)
    with ExitStack() as ended, chromium.Page(program, folder / "profile", 1120, 740) as browser:
        ended.callback(server.kill)
        assert server.stdout
        url = server.stdout.readline().split()[1].removesuffix("v1")
        browser.open(url)
        browser.evaluate("document.getElementById('temperature').value = '0'")
        browser.evaluate("document.getElementById('max_tokens').value = '80'")
        browser.click("#logprobs")
        browser.evaluate("document.getElementById('text').focus()")
        browser.type(QUESTION)
        browser.press("Enter")
        browser.wait("document.querySelectorAll('.facts button').length === 2")
        browser.point("article:not(.mine) .parts")
        browser.wait("!document.getElementById('token').hidden")
        save(browser.screenshot(), DOCS / "serve.png")


def save(shot: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    image.quantize(64).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
