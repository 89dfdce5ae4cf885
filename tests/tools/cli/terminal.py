"""A real terminal for what a test prints in its own process."""

from __future__ import annotations

import os
import pty
import re
import sys

import pytest

ESCAPE = "\x1b["


class Terminal:
    """While entered, stdout and stderr are a real terminal of 60 columns; `seen` is what it received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = ""
        self._monkeypatch = monkeypatch
        self._reader, writer = pty.openpty()
        self._stream = os.fdopen(writer, "w", encoding="utf-8")

    def __enter__(self) -> Terminal:
        self._monkeypatch.setenv("TERM", "xterm-256color")
        self._monkeypatch.setenv("COLUMNS", "60")
        # Not earlier: pytest puts its own streams back between a fixture and its test.
        self._monkeypatch.setattr(sys, "stdout", self._stream)
        self._monkeypatch.setattr(sys, "stderr", self._stream)
        return self

    def __exit__(self, *_: object) -> None:
        self._monkeypatch.undo()
        self._stream.write("\0")
        self._stream.flush()
        while not self.seen.endswith("\0"):
            self.seen += os.read(self._reader, 100_000).decode()
        self.seen = self.seen.replace("\r\n", "\n").removesuffix("\0")
        self._stream.close()
        os.close(self._reader)


def strip(text: str) -> str:
    """The text without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
