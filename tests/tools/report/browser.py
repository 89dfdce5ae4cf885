"""A small driver of Chromium over a pipe, with the standard library alone."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def executable() -> str | None:
    """The browser of this machine, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser of its own, without a profile.

    Attributes:
        said: what the page wrote to the console, and what the browser logged about it.
    """

    def __init__(self, program: str, profile: Path) -> None:
        (there, self._to), (self._from, back) = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4; copies with high numbers cannot be in the way.
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (there, back))

        def connect() -> None:
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (there, back, read, write):
            os.close(end)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.said: list[str] = []
        self._events: list[str] = []
        self._session = ""
        (target,) = (t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        found = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self.ask("Browser.close")
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._to)
            os.close(self._from)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return dict(found["result"])

    def open(self, file: Path, *, width: int, scheme: str, height: int = 900) -> None:
        """Show a file in a window of this width, in the colours ``light`` or ``dark``."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.ask("Page.navigate", url=file.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def run(self, expression: str) -> Any:
        """Return what a JavaScript expression gives, as JSON holds it."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        if key == "Enter":
            facts["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, **facts)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], SECONDS)
            assert ready, "the browser does not answer"
            more = os.read(self._from, 1 << 20)
            if not more:
                raise BrokenPipeError("the browser has ended")
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        method, facts = found.get("method", ""), found.get("params", {})
        self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(facts["args"]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(facts["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(facts["entry"]["text"])
        return found
