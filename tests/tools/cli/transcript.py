"""Commands and what they have to print, as texts in `tests/tools/cli/transcripts`.

    A line like this one says what follows shows.
    > mine.py
        the lines of a file; a file without lines is removed
    < made.py | word
        the lines of a file that a command wrote
    $ NAME=value check tiny --json | target verdict
        what `veomni-hook check tiny --json` prints: of JSON the named fields, of tables and texts the lines
        with that word
      ! what it prints on standard error
      = its status, if that is not 0

A variable without a value is unset. ``HERE`` is the folder of the test. `WRITE_EXPECTED=1 pytest ...` writes what
commands print now: read the difference.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from veomni_hook.tools.cli.app import app

from .conftest import Done

FOLDER = Path(__file__).with_name("transcripts")
#: What is another with each change of the package, or on another Python.
_UNSTABLE = {
    "HASH": re.compile(r"\b(?:[0-9a-f]{16}|[0-9a-f]{40})\b"),
    "SIZE": re.compile(r"\b[1-9][\d.]* (?:KiB|B)\b"),
    "(find)": re.compile(r"\(find, line \d+\)"),
}
_VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
_FILE, _ERROR, _STATUS = "    ", "  ! ", "  = "


Run = Callable[[list[str], dict[str, str | None]], Done]


def installed(*folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules be found in these folders first, and forget transformers if other tests have imported it."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    for folder in folders:
        monkeypatch.syspath_prepend(str(folder))


def here(words: list[str], variables: dict[str, str | None]) -> Done:
    """Run a command in this process."""
    done = CliRunner().invoke(app, words, env=variables)
    return Done(done.exit_code, done.stdout, done.stderr)


def compare(name: str, run: Run, names: Mapping[str, object]) -> None:
    """Run the commands of a transcript in the working directory, and compare all that they print.

    ``names`` are words for what is another in each run, as paths of folders.
    """
    stored = FOLDER / f"{name}.txt"
    folders = {"HERE": Path.cwd(), **names}
    text = "".join(line.rstrip() + "\n" for step in _steps(stored) for line in _shown(step, run, folders))
    if os.environ.get("WRITE_EXPECTED"):
        stored.write_text(text, encoding="utf-8")
    expected = stored.read_text(encoding="utf-8")
    if different := "\n".join(
        unified_diff(expected.splitlines(), text.splitlines(), stored.name, "now", "", "", 1, "")
    ):
        pytest.fail(different, pytrace=False)


def _steps(stored: Path) -> Iterator[list[str]]:
    """Each line of a transcript that is no output, with the indented and empty lines below it."""
    step: list[str] = []
    for line in stored.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("  ") and step:
            yield step
            step = []
        step.append(line)
    yield step


def _shown(step: list[str], run: Run, names: Mapping[str, object]) -> Iterator[str]:
    head, *below = step
    space = [""] if below and not below[-1] else []
    yield head
    sign, _, rest = head.partition(" ")
    if sign == ">":
        lines = below[: len(below) - len(space)]
        _write(Path(rest), "".join(f"{line.removeprefix(_FILE)}\n" for line in lines))
        yield from lines
    elif sign == "<":
        file, _, wanted = rest.partition(" | ")
        yield from _indented(_with(wanted, Path(file).read_text(encoding="utf-8")), _FILE, names)
    elif sign == "$":
        yield from _printed(rest, run, names)
    else:
        yield from below[: len(below) - len(space)]
    yield from space


def _write(path: Path, text: str) -> None:
    if text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    else:
        path.unlink()


def _printed(command: str, run: Run, names: Mapping[str, object]) -> Iterator[str]:
    typed, _, wanted = command.partition(" | ")
    for word, value in names.items():
        typed = typed.replace(word, str(value))
    words = shlex.split(typed)
    variables: dict[str, str | None] = {}
    while words and (variable := _VARIABLE.fullmatch(words[0])):
        variables[variable[1]] = variable[2] or None
        del words[0]
    done = run(words, variables)
    out = done.out
    if wanted and "--json" in words:
        out = "".join(f"{json.dumps(row)}\n" for row in _fields(json.loads(out), wanted.split()))
    else:
        out = _with(wanted, out)
    yield from _indented(out, _FILE, names)
    yield from _indented(done.err, _ERROR, names)
    if done.status:
        yield f"{_STATUS}{done.status}"


def _with(wanted: str, text: str) -> str:
    """The lines that hold a word, with one space for many."""
    if not wanted:
        return text
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines() if wanted in line)


def _fields(document: Any, wanted: list[str]) -> list[Any]:
    """The wanted fields of a document, or of each of its rows; one that is wanted alone without its name."""
    rows = document if isinstance(document, list) else [document]
    return [row[wanted[0]] if len(wanted) == 1 else {name: row[name] for name in wanted} for row in rows]


def _indented(text: str, indent: str, names: Mapping[str, object]) -> Iterator[str]:
    for word, value in names.items():
        text = text.replace(str(value), word)
    for word, pattern in _UNSTABLE.items():
        text = pattern.sub(word, text)
    yield from (f"{indent}{line}" for line in text.splitlines())
