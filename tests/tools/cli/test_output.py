from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from veomni_hook.errors import ConfigError
from veomni_hook.tools.cli import output

from .terminal import ESCAPE, Terminal, strip


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


def test_a_table_on_a_terminal_becomes_blocks_and_breaks_no_word(terminal: Terminal) -> None:
    long = "n" * 70
    with terminal:
        output.emit_table(["name", "value"], [[long, "[v] 1.5 ms, " + "20 MiB " * 9], ["b", None]])
    assert strip(terminal.seen).split("\n") == [
        f"name   {long}",
        "value  [v] 1.5 ms, " + " ".join(["20 MiB"] * 6),
        "       " + " ".join(["20 MiB"] * 3),
        "",
        "name   b",
        "",
    ]
    assert ESCAPE in terminal.seen


def test_messages_on_a_terminal_are_broken_between_words(terminal: Terminal) -> None:
    with terminal:
        output.note("word " * 11 + "1.234 ms")
        output.fail(ConfigError("what", where="there " * 12, fix="this"))
    assert strip(terminal.seen).split("\n") == [
        " ".join(["word"] * 11),
        "  1.234 ms",
        "error: what",
        "  where: " + " ".join(["there"] * 8),
        "    " + " ".join(["there"] * 4),
        "  fix:   this",
        "",
    ]


@pytest.mark.parametrize("columns", ["0", "wide", ""])
def test_columns_that_are_no_number_do_not_count(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert output.width_of(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "50")
    assert output.width_of(io.StringIO()) == 50


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
