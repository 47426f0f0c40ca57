"""`scorecard.html`: the samples of an evaluation, or of two side by side, in a page of its own.

It needs no network and no other file. The data stand in it as JSON, which is not run, and its
script puts them in as text. The policy in its head lets this style sheet and this script in, by
digest, and nothing else. `page.html`, `page.css` and `page.js` are its parts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vox_core.api.files import read_json, storage_errors, write_text
from vox_eval.scorecard import SAMPLES, SCORECARD

PAGE = "scorecard.html"
LONGEST = 20_000
"""Characters of a text in the page."""


def write_page(folder: Path, against: Path | None = None, *, names: Sequence[str] = ()) -> None:
    """Write the page of an evaluation into its folder.

    Args:
        against: folder of another evaluation of the same suite, to show beside it.
        names: of the models, for display; none: as the scorecards have them.
    """
    folders = [folder, *([against] if against else [])]
    cards: list[Any] = [read_json(each / SCORECARD) for each in folders]
    with storage_errors(folder):
        contents = [(each / SAMPLES).read_bytes() for each in folders]
    # Not lines of text: those end at U+2028, too.
    lines = [list(map(json.loads, content.splitlines())) for content in contents]
    ids = list(cards[0]["tasks"])
    tasks = [
        {
            "id": id,
            "higher": cards[0]["tasks"][id]["higher_is_better"],
            "scores": [_score(card["tasks"][id]) for card in cards],
        }
        for id in ids
    ]
    numbers = {id: number for number, id in enumerate(ids)}
    samples = [
        [numbers[rows[0]["task"]], _prompt(rows[0]), *map(_answer, rows)]
        for rows in zip(*lines, strict=True)
    ]
    models = names or [card["model"] for card in cards]
    data = {"models": models, "tasks": tasks, "samples": samples}
    write_text(folder / PAGE, _page(f"{cards[0]['suite']}: {' against '.join(models)}", data))


def _score(task: Any) -> str:
    interval = "{:.4f} to {:.4f}".format(*task["interval"]) if task["interval"] else "equal values"
    return f"{task['score']:.4f} {task.get('unit', '')}".rstrip() + f" ({interval})"


def _prompt(line: Any) -> str:
    prompt = line["prompt"]
    messages = prompt if isinstance(prompt, list) else []
    parts = [f"{each['role']}: {each['content']}" for each in messages]
    return _cut("\n".join(parts) if messages else prompt)


def _answer(line: Any) -> list[Any]:
    return [_cut(line["answer"]), line["score"], line["why"]]


def _cut(text: str) -> str:
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]}\n… and {more:,} more characters in {SAMPLES}"


def _page(title: str, data: Any) -> str:
    text, style, script = (
        (Path(__file__).parent / name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "page.js")
    )
    embedded = json.dumps(data, separators=(",", ":"))  # in ASCII, without what could end it
    for sign in "<>&":
        embedded = embedded.replace(sign, f"\\u{ord(sign):04x}")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    shown = html.escape(title.encode("utf-8", "backslashreplace").decode())
    parts = {"policy": policy, "title": shown, "style": style, "script": script, "data": embedded}
    found = text.split("@")
    return "".join(parts[each] if at % 2 else each for at, each in enumerate(found))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
