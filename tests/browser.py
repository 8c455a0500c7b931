"""A real browser without a window, spoken to through a pipe: what somebody sees who opens a page."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason=f"no browser is installed: none of {', '.join(NAMES)}")
COMMANDS, ANSWERS = 3, 4
"""File descriptors on which it listens and answers."""


class Browser:
    """One open page.

    Attributes:
        requests: addresses that the page asked for, itself included.
        complaints: what it wrote to its console.
    """

    def __init__(self, commands: int, answers: int):
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._commands, self._answers = commands, answers
        self._buffer, self._count, self._session = b"", 0, None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, height: int = 844, dark: bool = False) -> None:
        """Show a file on a screen of so many CSS pixels; a narrow one is a phone's."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=path.resolve().as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """Return what JavaScript makes of the page."""
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a PNG of the screen, or of the whole page."""
        return base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._count:
            pass
        assert "result" in answer, answer
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(message["params"]))
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and stop it."""
    listening, commands = map(_high, os.pipe())
    answers, answering = map(_high, os.pipe())

    def connect() -> None:
        os.dup2(listening, COMMANDS)
        os.dup2(answering, ANSWERS)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        started = subprocess.Popen(
            [str(PROGRAM), *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            stderr=subprocess.DEVNULL,
            pass_fds=(COMMANDS, ANSWERS),
            preexec_fn=connect,
        )
        os.close(listening)
        os.close(answering)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            started.kill()
            started.wait()


def _high(descriptor: int) -> int:
    """Move a descriptor out of the way of those that the browser expects."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
