from __future__ import annotations

from pathlib import Path

import pytest

from veomni_hook.tools.cli import pager

from .terminal import ESCAPE, Terminal, strip

LONG = "--- a\n+++ b\n" + f"+{'x' * 1000}\n" * 100  # more than a pipe holds


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Terminal:
    """A terminal whose user has chosen a pager that writes to a file."""
    for name in ("NO_COLOR", "LESS", "LV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGER", "cat > seen; echo $LESS > options")
    return Terminal(monkeypatch)


def test_the_users_pager_gets_everything_in_colour(terminal: Terminal, tmp_path: Path) -> None:
    with terminal:
        pager.show(LONG, "diff", paged=True)
    seen = (tmp_path / "seen").read_text()
    assert ESCAPE in seen and strip(seen) == LONG
    assert (tmp_path / "options").read_text() == "FRX\n"
    assert terminal.seen == ""


def test_no_color_holds_in_the_pager(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal:
        pager.show("+x = 1\n", "diff", paged=True)
    assert (tmp_path / "seen").read_text() == "+x = 1\n"


def test_who_leaves_the_pager_early_gets_no_error(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGER", "true")
    with terminal:
        pager.show(LONG, "diff", paged=True)
    assert terminal.seen == ""


def test_a_pager_that_is_not_there_costs_a_warning(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGER", "no-such-pager 2>/dev/null")
    with terminal:
        pager.show("+x = 1\n", "diff", paged=True)
    assert "the pager cannot be run: no-such-pager" in strip(terminal.seen)
    assert "\n+x = 1\n" in strip(terminal.seen)


@pytest.mark.parametrize("variables", [{"PAGER": ""}, {"PAGER": "cat"}, {"TERM": "dumb"}])
def test_where_no_pager_is_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    with terminal:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert pager.pager() is None


def test_a_terminal_has_less_and_a_pipe_has_no_pager(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pager.shutil, "which", lambda name: f"/bin/{name}")
    assert pager.pager() is None
    monkeypatch.delenv("PAGER")
    with terminal:
        assert pager.pager() == "less"
    with terminal.__class__(monkeypatch):
        monkeypatch.setattr(pager.shutil, "which", lambda name: None)
        assert pager.pager() is None
