"""The page at `/`: chat with the served models in a browser.

`page.html` is one static file and holds nothing of the server, so it needs no key; its script calls
the API as every other client does. The policy admits its style sheet and its script by digest, and
requests to the server that sent it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse

if TYPE_CHECKING:
    from starlette.requests import Request


async def show(request: Request) -> HTMLResponse:
    """Answer `GET /`."""
    text = _text()
    headers = {
        "Content-Security-Policy": _policy(text),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(text, headers=headers)


@cache
def _text() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")


@cache
def _policy(text: str) -> str:
    style, script = (_digest(text, element) for element in ("style", "script"))
    return (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _digest(text: str, element: str) -> str:
    (found,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
