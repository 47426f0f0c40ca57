"""A real browser for tests: Chromium without a window, told what to do over a pipe.

Its DevTools protocol is JSON, ended by a zero byte, on the file descriptors 3 and 4; nothing
listens on a port, and nothing beside the browser is needed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {"Enter": {"text": "\r", "windowsVirtualKeyCode": 13}}
"""Keys that do something of their own, such as sending a form."""


def find() -> str | None:
    """The browser: `VOX_BROWSER`, or the first that is on the path."""
    named = os.environ.get("VOX_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser of its own; use it as a context."""

    def __init__(self, program: str, profile: Path, width: int = 1100, height: int = 800) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = [
            "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]  # fmt: skip

        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "-", program, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._left, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def __enter__(self) -> Page:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what the page does meanwhile is noted."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        asked |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(told["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"]))

    def open(self, url: str) -> None:
        """Open a page of vox's, and wait until its script says that it is done."""
        self.send("Page.navigate", url=url)
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def evaluate(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is true, frame by frame."""
        wait = (
            "new Promise(done => { const look = () => { let found = false; "
            f"try {{ found = {expression}; }} catch (_) {{}} "
            "found ? done(true) : setTimeout(look, 20); }; look(); })"
        )
        for _ in range(5):  # a navigation on the way takes the promise with it
            try:
                self.send("Runtime.evaluate", expression=wait, awaitPromise=True)
                return
            except AssertionError:
                continue
        raise AssertionError(f"never so: {expression}")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else KEYS.get(key, {})
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def point(self, selector: str) -> None:
        """Move the mouse over the first such element, once the page has stopped scrolling to it."""
        scrolled = (
            f"(async () => {{ const e = document.querySelector({selector!r}); "
            "e.scrollIntoView({block: 'center'}); "
            "for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame); "
            "const b = e.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        how = {"expression": scrolled, "awaitPromise": True, "returnByValue": True}
        x, y = self.send("Runtime.evaluate", **how)["result"]["value"]
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({selector!r}).click()")

    def dark(self, wanted: bool) -> None:
        value = "dark" if wanted else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
