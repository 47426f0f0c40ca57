"""Rows as one HTML page that needs nothing else: no network, no other file.

The data stand in it as JSON, which is not run, and its own script (`page.js`) puts them in as text.
The policy in its head lets this style sheet and this script in, by digest, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vox_core.api.rows import Finding
from vox_data.token_view import TokenView

MADE_BY = '<meta name="generator" content="vox data preview">'

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{made_by}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<dl>{facts}</dl>
<p id="legend" aria-label="legend"><span class="on">trained</span>
<span>context</span> <span class="special">&lt;special token&gt;</span>
<span class="on special">&lt;trained special token&gt;</span>
<span class="on part">another weight than 1</span>
<span class="cut">cut away</span> <span class="start">a new piece of a long text</span>
<span class="end">↵</span> end of a line</p>
<section aria-label="findings"><h2>Findings</h2>{findings}</section>
<noscript><p>The rows are shown by the page's own script, which is turned off.</p></noscript>
<form id="tools" role="search">
<label>Search <input type="search" id="search" placeholder="press /"></label>
<label>File <select id="file"><option value="">all</option></select></label>
<label>Finding <select id="finding"><option value="">any</option></select></label>
<label><input type="checkbox" id="trained-only"> trained only</label>
<label><input type="checkbox" id="with-findings"> with findings</label>
<label><input type="checkbox" id="truncated"> truncated</label>
<span id="count" role="status"></span>
</form>
<p>Keys: / search, j and k next and previous row, arrows from token to token.</p>
<main aria-label="rows"></main>
<div id="says" role="status" aria-live="polite"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(
    title: str, facts: Mapping[str, str], findings: Sequence[Finding], rows: Sequence[TokenView]
) -> str:
    """The page.

    Args:
        facts: what stands above the rows, by its label.
        findings: of the audit.
    """
    style, script = (_beside(name) for name in ("page.css", "page.js"))
    return _PAGE.format(
        made_by=MADE_BY,
        policy=_policy(style, script),
        title=_text(title),
        style=style,
        script=script,
        facts="".join(
            f"<dt>{_text(label)}</dt><dd>{_text(text)}</dd>" for label, text in facts.items()
        ),
        findings=_list(findings),
        data=_json(rows),
    )


def is_page(path: Path) -> bool:
    """Whether a file is a page that was made here, and may be made again."""
    with path.open("rb") as file:
        return MADE_BY.encode() in file.read(1000)


def _beside(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _list(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>none</p>"
    items = (f"<li><b>{each.kind.level}</b> {_text(str(each))}</li>" for each in findings)
    return f'<ul class="findings">{"".join(items)}</ul>'


def _text(text: str) -> str:
    """As text in markup; half a surrogate, which has no encoding, written out."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())


def _json(rows: Sequence[TokenView]) -> str:
    """In ASCII, and without what could end the element that it stands in."""
    numbers = {path: n for n, path in enumerate(dict.fromkeys(row.file for row in rows))}
    found = {
        "files": [str(path) for path in numbers],
        "rows": [{**row.to_json(), "file": numbers[row.file]} for row in rows],
    }
    text = json.dumps(found, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
