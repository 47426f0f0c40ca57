"""The page at `/`, as the server sends it; tests/browser/test_chat_page.py opens it in Chromium."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

KEY = "correct horse battery"


class Elements(HTMLParser):
    """Every element's attributes, and the text in `style` and `script`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inside: dict[str, str] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open in ("style", "script"):
            assert self._open not in self.inside or not data.strip(), "one of each"
            self.inside.setdefault(self._open, data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


@pytest.fixture(scope="module")
def answered(client):
    response = client.get("/")
    assert response.status_code == 200
    return response


def test_its_policy_admits_its_own_style_and_script_and_no_other_origin(answered) -> None:
    policy = dict(
        directive.split(" ", 1)
        for directive in answered.headers["content-security-policy"].split("; ")
    )
    page = Elements(answered.text)
    for element in ("style", "script"):
        digest = hashlib.sha256(page.inside[element].encode()).digest()
        assert policy.pop(f"{element}-src") == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert answered.headers["content-type"] == "text/html; charset=utf-8"
    assert answered.headers["x-content-type-options"] == "nosniff"
    assert answered.headers["referrer-policy"] == "no-referrer"


def test_it_has_nothing_that_the_policy_forbids(answered) -> None:
    """Event handlers and style attributes; links to elsewhere; text that becomes markup."""
    page = Elements(answered.text)
    names = {name for _, name, _ in page.attributes}
    assert [name for name in names if name.startswith("on") or name == "style"] == []
    links = [value for _, name, value in page.attributes if name in ("href", "src", "action")]
    assert [link[:19] for link in links] == ["data:image/svg+xml,"]
    script = page.inside["script"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert "localStorage" not in script
    assert re.findall(r"https?://", script) == []


def test_it_needs_no_key_and_has_nothing_of_the_server(opened, answered) -> None:
    with opened.client(key=KEY) as guarded:
        sent = guarded.get("/", headers={"host": "far.example"})
        assert (sent.status_code, sent.text) == (200, answered.text)
        assert guarded.head("/").status_code == 200
        assert guarded.get("/v1/models").status_code == 401
    assert not [name for name in (*opened.models, KEY) if f">{name}<" in sent.text]


def test_without_a_key_it_answers_at_loopback_names_only(client) -> None:
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.post("/").status_code == 405
