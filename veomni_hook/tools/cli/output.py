"""Output of the commands: results to stdout, everything else to stderr.

Colour is for terminals only, and `NO_COLOR` disables it there too. Text on a terminal fits its width. A
result that goes to a pipe or a file is plain text: exact source, or columns of any width unless `COLUMNS` is
set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import IO, TYPE_CHECKING

from veomni_hook import layout
from veomni_hook.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from veomni_hook.errors import VeomniHookError

USUAL_WIDTH = 80  # of a terminal that does not report its width
BROKEN_PIPE = 141  # what a shell reports for a program killed by SIGPIPE, as in `cat file | head`


def console(*, stderr: bool = False) -> Console:
    """Return a rich console; it writes escape sequences only to a terminal, and none under `NO_COLOR`."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    plain = not is_terminal(stream) or bool(os.environ.get("NO_COLOR"))
    # rich would obey FORCE_COLOR (set in many CI systems) in a pipe, and write bold text under NO_COLOR.
    return Console(
        file=stream,
        force_terminal=is_terminal(stream),
        color_system=None if plain else "auto",
        highlight=False,
        emoji=False,
    )


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a stream exists, is open, and is a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def width_of(stream: IO[str] | None) -> int | None:
    """Return a stream's width: `COLUMNS`, else the terminal's; None means no limit, as in a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if stream is None or not is_terminal(stream):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL_WIDTH
    except (OSError, ValueError):
        return USUAL_WIDTH


def emit(text: str) -> None:
    """Write a result to stdout as UTF-8, with unchanged line endings.

    Raises:
        BrokenPipeError: the reader is gone; the application's group converts this to an exit status.
    """
    if sys.stdout is None:
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    sys.stdout.buffer.flush()


def emit_code(text: str, lexer: str) -> None:
    """Write source text or a diff to stdout, coloured if that is a terminal.

    Args:
        text: the code; written unchanged if stdout is not a terminal.
        lexer: the name of the pygments lexer.
    """
    emit(coloured(text, lexer))


def coloured(text: str, lexer: str) -> str:
    """Return code with colours if stdout supports them; unchanged if stdout is not a terminal."""
    target = console()
    if target.color_system is None:
        return text
    from rich.syntax import Syntax

    shown = Syntax("", lexer, theme="ansi_dark", background_color="default").highlight(text)
    shown.rstrip()
    with target.capture() as captured:
        target.print(shown, soft_wrap=True)
    return captured.get()


def emit_json(value: object) -> None:
    """Write one JSON document to stdout."""
    import json

    emit(json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n")


def emit_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, optional: Sequence[str] = ()
) -> None:
    """Write a table to stdout: aligned columns, or one block per entry if they do not fit.

    Args:
        headers: the names of the columns.
        rows: the cells.
        optional: columns that may be dropped, last one first, to make the table fit.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    lines = layout.table(headers, cells, width_of(sys.stdout), optional=optional)
    for head, group in groupby(lines, key=lambda line: line.head):
        _print("\n".join(line.text for line in group), "bold" if head else "")


def emit_heading(text: str) -> None:
    """Write a section heading to stdout."""
    _print(layout.paragraphs(text, width_of(sys.stdout), indent=0), "bold cyan")


def emit_fields(fields: Mapping[str, object]) -> None:
    """Write name and value pairs to stdout, one per line, indented below a heading."""
    emit(layout.fields({name: _cell(value) for name, value in fields.items()}, width_of(sys.stdout)))


def emit_text(text: str) -> None:
    """Write lines of prose to stdout, wrapped between words."""
    emit(layout.paragraphs(text, width_of(sys.stdout)))


def note(message: str) -> None:
    """Write a line about the work itself to stderr."""
    _say(message, "")


def warn(message: str) -> None:
    """Write a warning to stderr."""
    _say(f"warning: {message}", "yellow")


def fail(error: VeomniHookError) -> None:
    """Write the three parts of an error to stderr."""
    _say(f"error: {error}", "red")


def track(items: Sequence[str], label: str) -> Iterator[str]:
    """Yield the items; show a progress bar on stderr if that is a terminal."""
    target = console(stderr=True)
    if not target.is_terminal:
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=target, transient=True) as progress:
        task = progress.add_task(label, total=len(items))
        for item in items:
            progress.update(task, description=printable(f"{label} {item}"))
            yield item
            progress.advance(task)


def abandon_stdout() -> None:
    """After a broken pipe, discard the buffered output so that the exit is silent."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _say(message: str, style: str) -> None:
    if sys.stderr is None:
        return
    message = layout.paragraphs(message, width_of(sys.stderr) if is_terminal(sys.stderr) else None)
    target = console(stderr=True)
    if target.color_system is None or not style:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
        return
    from rich.text import Text

    target.print(Text(message, style=style), soft_wrap=True)


def _print(text: str, style: str) -> None:
    """Write lines to stdout, in a style if it has one and stdout has colours."""
    target = console()
    if target.color_system is None or not style:
        emit(f"{text}\n")
        return
    from rich.text import Text

    target.print(Text(text, style=style), soft_wrap=True)


def _cell(value: object) -> str:
    if value is None or value in ((), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value)
    return str(value)


def _plain(value: object) -> object:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    return str(value)
