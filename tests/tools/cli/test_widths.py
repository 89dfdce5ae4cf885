"""What commands print at 60, 80 and 120 columns, against stored texts: tests/tools/cli/widths/.

`WRITE_EXPECTED=1 pytest tests/tools/cli/test_widths.py` writes them anew: read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from .printed import COMMANDS

EXPECTED = Path(__file__).with_name("widths")
FIGURES = re.compile(r"[\d.,]+ (?:ms|%|MiB)(?!\w)")


def printed(
    command: str, columns: int | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """What a command prints at a width, or into a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    COMMANDS[command]()
    return capfd.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_tables_fit_and_break_no_word(
    command: str, columns: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(command, columns, capfd, monkeypatch)
    stored = EXPECTED / f"{command}-{columns}.txt"
    if os.environ.get("WRITE_EXPECTED"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(text, encoding="utf-8")
    assert text == stored.read_text(encoding="utf-8")
    for line in text.splitlines():
        # Nothing but a word that is longer than what is left of a line goes beyond its end.
        assert len(line) <= columns or len(line.split()) <= 2
    whole = printed(command, None, capfd, monkeypatch)
    words = {word.strip(",") for word in whole.split()}
    assert {word.strip(",") for word in text.split()} <= words | set("not shown at this width:".split())
    assert all(figure in text for figure in FIGURES.findall(whole))


def test_a_pipe_is_as_wide_as_it_takes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed("explain", None, capfd, monkeypatch).splitlines()
    row = next(line for line in lines if line.startswith("31-40"))
    assert len(row) > 120 and row.split()[-1] == "veomni_hook.idioms"
