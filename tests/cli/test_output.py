from __future__ import annotations

import io
import json
import os
import pty
import sys
from pathlib import Path

import pytest

from veomni_hook.cli import output
from veomni_hook.errors import ConfigError

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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal(monkeypatch)


def test_a_pipe_gets_the_exact_characters(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    text = "x = 'ä'\r\n\f# [bold]no markup[/bold] :smile:\n" + "y" * 300
    output.emit_code(text, "python")
    assert capfdbinary.readouterr().out == text.encode()


def test_a_forced_colour_does_not_reach_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.emit_code("import os\n", "python")
    output.emit_heading("heading")
    output.warn("careful")
    found = capfdbinary.readouterr()
    assert found.out == b"import os\nheading\n"
    assert found.err == b"warning: careful\n"


def test_a_terminal_gets_colour_and_every_character(terminal: Terminal) -> None:
    line = "value = '" + "x" * 200 + "'  # [bold]comment[/bold]\n"
    with terminal:
        output.emit_code(line, "python")
    assert ESCAPE in terminal.seen
    assert strip(terminal.seen) == line


def test_no_color_turns_off_every_escape_sequence(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal:
        output.emit_code("import os\n", "python")
        output.emit_heading("heading")
        output.emit_table(["a"], [["b"]])
        output.warn("careful")
    assert terminal.seen.split() == ["import", "os", "heading", "a", "b", "warning:", "careful"]


def test_errors_and_headings_are_coloured_on_a_terminal(terminal: Terminal) -> None:
    with terminal:
        output.emit_heading("heading")
        output.fail(ConfigError("what", where="there", fix="this"))
    assert ESCAPE in terminal.seen
    assert strip(terminal.seen) == "heading\nerror: what\n  where: there\n  fix:   this\n"


def test_a_table_in_a_pipe_is_aligned_and_never_cut(capfd: pytest.CaptureFixture[str]) -> None:
    output.emit_table(
        ["name", "value"], [["n" * 100, None], ["b", ["x", "y"]], ["c", True], ["d", ()], ["e", 0]]
    )
    lines = capfd.readouterr().out.split("\n")
    assert lines[0] == "name" + " " * 98 + "value"
    assert lines[1] == "n" * 100 + "  -"
    assert [line.split() for line in lines[2:6]] == [["b", "x,", "y"], ["c", "yes"], ["d", "-"], ["e", "0"]]
    assert lines[6:] == [""]


def test_a_table_on_a_terminal_fits_and_loses_nothing(terminal: Terminal) -> None:
    with terminal:
        output.emit_table(["name", "value"], [["n" * 100, "[v]" + "w" * 20]])
    lines = strip(terminal.seen).split("\n")
    assert max(map(len, lines)) <= 60
    assert sum(line.count("n") for line in lines[1:]) == 100
    assert any("[v]" + "w" * 20 in line for line in lines)


def test_json_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    class Record:
        def to_dict(self) -> dict[str, object]:
            return {"path": Path("/x"), "names": {"b", "a"}}

    output.emit_json({"ä": Record()})
    text = capfd.readouterr().out
    assert json.loads(text) == {"ä": {"path": "/x", "names": ["a", "b"]}}
    assert "ä" in text


def test_notes_stay_off_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    output.note("a")
    output.warn("b")
    assert capfd.readouterr() == ("", "a\nwarning: b\n")


def test_progress_is_for_terminals(terminal: Terminal) -> None:
    with terminal:
        assert list(output.track(["qwen3", "llama"], "checking")) == ["qwen3", "llama"]
    assert "checking" in terminal.seen and "/2" in strip(terminal.seen)


def test_no_progress_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(output.track(["qwen3"], "checking")) == ["qwen3"]
    assert capfd.readouterr() == ("", "")


def test_closed_streams_are_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    output.emit("x")
    output.note("y")
    assert not output.is_terminal(None)
    closed = io.StringIO()
    closed.close()
    assert not output.is_terminal(closed)


def strip(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
