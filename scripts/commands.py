"""The page docs/cli.md: `python -m scripts.commands` writes it from the help of every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from veomni_hook.tools.cli.app import app

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
NOTE = "<!-- written by python -m scripts.commands -->"
PURPOSE = "After this page you know every command and option; each command shows the same with `--help`."


def document() -> str:
    """Return the text of the page."""
    command = typer.main.get_command(app)
    shorten(command)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="veomni-hook", title="Command line"
    )
    lines = [line.rstrip() for line in text.strip().splitlines()]
    title, *rest = lines
    return "\n".join([title, "", PURPOSE, "", NOTE, *rest]) + "\n"


def shorten(command: Any) -> None:
    """Give every command below the first paragraph of its help as its short help; click's is cut off."""
    context = typer.Context(command)
    for name in command.list_commands(context):
        one = command.get_command(context, name)
        one.short_help = " ".join((one.help or "").partition("\n\n")[0].split())
        if hasattr(one, "list_commands"):
            shorten(one)


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
