"""A page in headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60
_KEYS = {
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Enter": 13,
    "Escape": 27,
}
# Chromium reads commands from descriptor 3 and answers on 4.
_START = """
import os, sys
read, write = (os.dup(int(n)) for n in sys.argv[1:3])
while min(read, write) < 5:
    read, write = os.dup(read), os.dup(write)
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """The path of Chromium, if it is installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own, with a profile in a temporary folder.

    Attributes:
        errors: What scripts threw, and what the page was not permitted to do.
        requests: The addresses that the page asked for.
    """

    def __init__(self, width: int = 1500, height: int = 1000) -> None:
        path = chromium()
        assert path is not None, "no Chromium"
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self._loaded = False
        self._folder = tempfile.TemporaryDirectory(prefix="qfuse-browser-")
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        command = [
            path,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={self._folder.name}",
            f"--window-size={width},{height}",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(read), str(write), *command],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, page: Path) -> None:
        """Open a file and wait until it is loaded and drawn."""
        self._loaded = False
        self.requests.clear()
        self._call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._read()
        self.frame()

    def eval(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def frame(self) -> None:
        """Wait until the page is drawn."""
        self.eval(
            "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))"
        )

    def type(self, words: str) -> None:
        """Type text into what has the focus."""
        self._call("Input.insertText", text=words)
        self.frame()

    def press(self, key: str) -> None:
        """Press a key."""
        code = _KEYS.get(key, ord(key[0]))
        shown = {"text": key} if key not in _KEYS else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", **common, **shown)
        self._call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.frame()

    def click(self, selector: str) -> None:
        """Click into the middle of the first element of a selector."""
        place = self.eval(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent",
                type=kind, x=place[0], y=place[1], button="left", clickCount=1,
            )  # fmt: skip
        self.frame()

    def prefer(self, scheme: str) -> None:
        """Prefer the color scheme ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self.frame()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of what is visible, or of the whole page."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._send("Browser.close")
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder.name, ignore_errors=True)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: str, **params: Any) -> int:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None and not method.startswith("Browser."):
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        return self._last

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, **params)
        while True:
            message = self._read()
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    def _read(self) -> dict[str, Any]:
        """The next message; events are noted."""
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(until - time.monotonic(), 0))
            got = os.read(self._from, 1 << 20) if ready else b""
            assert got, "Chromium does not answer"
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case _:
                pass
        return message
