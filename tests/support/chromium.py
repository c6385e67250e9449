"""Headless Chromium for tests, driven over its debugging pipe (Chrome DevTools Protocol).

Messages are JSON, each terminated by a zero byte, written to descriptor 3 and read from descriptor 4 of the browser.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 90.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def browser() -> str | None:
    """Path of the browser; None if none is installed."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one page."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for the profile."""
        program = browser()
        assert program is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser expects descriptors 3 and 4, which may be in use here.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_read, to_write)]
        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=lambda: [os.dup2(end, 3 + place) for place, end in enumerate(ends)],
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (to_read, to_write, *ends):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []
        """Errors of the console, exceptions, and requests that failed."""
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol; return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])
        raise AssertionError(f"{method}: no answer within {PATIENCE_S:g} s")

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a page in a window of this size; `scheme` is light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Text of the first matching element; "" without a match."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        box = self.value(f"{find}.scrollIntoView(); ({find}.getBoundingClientRect()).toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until the condition is true; return its value."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.05)
        return found

    def screenshot(self, path: Path) -> bytes:
        """Save the whole page as a PNG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        data = base64.b64decode(found["data"])
        path.write_bytes(data)
        return data

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            waiting = select.poll()
            waiting.register(self._read, select.POLLIN)
            ready = waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
            assert ready, "the browser says nothing"
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser has ended with {self._process.poll()}"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        self._note(found)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(parameters["entry"]))
