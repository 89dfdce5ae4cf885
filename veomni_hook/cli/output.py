"""What the commands print, and where: results to stdout, everything else to stderr.

Colour and rich's layout are for terminals only, and `NO_COLOR` turns the colour off there too. A result that
goes into a pipe or a file is plain text: exact source, or columns that are never cut to a width.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from veomni_hook.errors import VeomniHookError

NARROW = 28  # a column up to this width keeps it; the wider ones share what is left of the terminal
BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended, as `cat file | head` does


def console(*, stderr: bool = False) -> Console:
    """Return a rich console; it writes escape sequences only to a terminal, and none under `NO_COLOR`."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    plain = not is_terminal(stream) or bool(os.environ.get("NO_COLOR"))
    # rich would obey FORCE_COLOR (set in many CI systems) in a pipe, and write bold under NO_COLOR.
    return Console(
        file=stream,
        force_terminal=is_terminal(stream),
        color_system=None if plain else "auto",
        highlight=False,
        emoji=False,
    )


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream is there, open, and a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def emit(text: str) -> None:
    """Write a result to stdout: these characters in UTF-8, with the line ends that they have.

    Raises:
        BrokenPipeError: the reader has gone; the application's group turns it into an exit status.
    """
    if sys.stdout is None:
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    sys.stdout.buffer.flush()


def emit_code(text: str, lexer: str) -> None:
    """Write source text or a diff to stdout, coloured where that is a terminal.

    Args:
        text: the code; written unchanged where stdout is no terminal.
        lexer: the name of the pygments lexer.
    """
    target = console()
    if target.color_system is None:
        emit(text)
        return
    from rich.syntax import Syntax

    coloured = Syntax("", lexer, theme="ansi_dark", background_color="default").highlight(text)
    coloured.rstrip()
    target.print(coloured, soft_wrap=True)


def emit_json(value: object) -> None:
    """Write one JSON document to stdout."""
    import json

    emit(json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")


def emit_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table to stdout: fitted to the width of a terminal, uncut and aligned elsewhere."""
    cells = [[_cell(value) for value in row] for row in rows]
    target = console()
    if not target.is_terminal:
        lines = [list(headers), *cells]
        widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
        padded = (
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines
        )
        emit("".join(line.rstrip() + "\n" for line in padded))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, header in enumerate(headers):
        widest = max(len(line[column]) for line in (list(headers), *cells))
        table.add_column(header, overflow="fold", no_wrap=widest <= NARROW)
    for line in cells:
        table.add_row(*(Text(text) for text in line))
    target.print(table)


def emit_heading(text: str) -> None:
    """Write the heading of a section of a result to stdout."""
    target = console()
    if target.color_system is None:
        emit(f"{text}\n")
        return
    from rich.text import Text

    target.print(Text(text, style="bold cyan"), soft_wrap=True)


def emit_fields(fields: Mapping[str, object]) -> None:
    """Write name and value pairs to stdout, one a line, indented below a heading."""
    width = max((len(name) for name in fields), default=0)
    emit("".join(f"  {name.ljust(width)}  {_cell(value)}".rstrip() + "\n" for name, value in fields.items()))


def note(message: str) -> None:
    """Write a line about the work itself to stderr."""
    _say(message, "")


def warn(message: str) -> None:
    """Write a warning to stderr."""
    _say(f"warning: {message}", "yellow")


def fail(error: VeomniHookError) -> None:
    """Write an error with its three parts to stderr."""
    _say(f"error: {error}", "red")


def track(items: Sequence[str], label: str) -> Iterator[str]:
    """Yield the items; where stderr is a terminal, a bar there shows how far the work is."""
    target = console(stderr=True)
    if not target.is_terminal:
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=target, transient=True) as progress:
        task = progress.add_task(label, total=len(items))
        for item in items:
            progress.update(task, description=f"{label} {item}")
            yield item
            progress.advance(task)


def abandon_stdout() -> None:
    """After a broken pipe: what is left in the buffers goes nowhere, so that exit is silent."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _say(message: str, style: str) -> None:
    if sys.stderr is None:
        return
    target = console(stderr=True)
    if target.color_system is None or not style:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
        return
    from rich.text import Text

    target.print(Text(message, style=style), soft_wrap=True)


def _cell(value: object) -> str:
    if value is None or value in ((), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value)
    return str(value)


def _plain(value: Any) -> object:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    return str(value)
