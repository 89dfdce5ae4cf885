"""Show long results on a terminal in the user's pager, as git does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import Annotated

import typer

from veomni_hook.tools.cli import output

#: The pager's environment unless the user has set it: `less` exits if the text fits on one screen, shows
#: colours and leaves the text on the screen.
ENVIRONMENT = {"LESS": "FRX", "LV": "-c"}
NOT_RUN = (126, 127)  # what a shell returns for a command that it cannot start

PagerOption = Annotated[
    bool,
    typer.Option(
        "--pager/--no-pager",
        help="Show the result in a pager (PAGER, or less) if stdout is a terminal.",
    ),
]


def show(text: str, lexer: str, *, paged: bool) -> None:
    """Show code in the pager if there is one and stdout is a terminal, otherwise directly on stdout.

    Args:
        text: the code.
        lexer: the name of the pygments lexer for its colours.
        paged: whether the user wants a pager.
    """
    command = pager() if paged else None
    if command is None:
        output.emit_code(text, lexer)
        return
    shown = output.coloured(text, lexer).encode("utf-8", "surrogatepass")
    sys.stdout.flush()
    environment = {**ENVIRONMENT, **os.environ}
    process = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, env=environment)
    # Ctrl-C is for the pager, which keeps running; this process must wait until it releases the terminal.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.communicate(shown)
    finally:
        signal.signal(signal.SIGINT, before)
    if process.returncode in NOT_RUN:
        output.warn(f"the pager cannot be run: {command}; set PAGER, or use --no-pager")
        output.emit_code(text, lexer)


def pager() -> str | None:
    """Return the pager's shell command; None if stdout is not a terminal, or PAGER is empty or cat."""
    if not output.is_terminal(sys.stdout) or os.environ.get("TERM", "") in ("", "dumb"):
        return None
    default = "less" if shutil.which("less") else ""
    chosen = os.environ.get("PAGER", default).strip()
    return None if chosen in ("", "cat") else chosen
