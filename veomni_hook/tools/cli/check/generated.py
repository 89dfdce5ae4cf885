"""`veomni-hook check --generated`: files that `dump` wrote, and what it prints now."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from difflib import unified_diff
from pathlib import Path

import typer

from veomni_hook.layout import counted
from veomni_hook.settings import Settings
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.usage import FOUND, UsageError, write_file
from veomni_hook.tools.facts import Facts
from veomni_hook.tools.generation.generate import Recipe

__all__ = ["compare"]

SAME, DIFFERS, FIXED = "same", "differs", "written anew"


def compare(named: Sequence[str], settings: Settings, *, fix: bool, as_json: bool) -> None:
    """Compare files, or those of folders, with what their own command makes now; write them anew on ``fix``.

    Raises:
        UsageError: no file is named, or one cannot be read or has no command.
        ConfigError, PatchError: what a file was made of does not exist or apply any more.
        typer.Exit: a file differs, and is not written anew.
    """
    if not named:
        how = "name what dump wrote: --generated FILE"
        raise UsageError("--fix says what to do with generated files", where="the command line", fix=how)
    rows = [_row(file, settings, fix=fix) for file in _files(named)]
    if as_json:
        output.emit_json(rows)
    else:
        for row in rows:
            output.emit_code(row["diff"], "diff")
        counts = {
            verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (SAME, DIFFERS, FIXED)
        }
        said = [f"{count} {verdict}" for verdict, count in counts.items() if count]
        output.emit_text(f"{counted(len(rows), 'generated file')}: {', '.join(said)}\n")
    if any(row["verdict"] == DIFFERS for row in rows):
        output.note("write them anew: veomni-hook check --generated FILE --fix")
        raise typer.Exit(FOUND)


def _files(named: Sequence[str]) -> Iterator[Path]:
    """The files, in order; of a folder those that `dump` wrote."""
    for path in map(Path, named):
        within = (
            [one for one in sorted(path.glob("*.py")) if Recipe.of(_read(one))] if path.is_dir() else [path]
        )
        if not within:
            fix = "name a folder that `veomni-hook dump -o FOLDER/` wrote"
            raise UsageError("no generated file is in this folder", where=str(path), fix=fix)
        yield from within


def _row(file: Path, settings: Settings, *, fix: bool) -> Facts:
    text = _read(file)
    recipe = Recipe.of(text)
    if recipe is None:
        raise UsageError(
            "the header does not say how it was made",
            where=str(file),
            fix="make it with `veomni-hook dump MODULE -o FILE`; a module without patches has no header",
        )
    variables = recipe.variables_of(settings)
    if recipe.variables != variables:
        then, now = (" ".join(values) or "the defaults" for values in (recipe.variables, variables))
        output.note(f"{file} was made with {then}; the settings are now {now}")
    with redirect_stdout(sys.stderr):
        module, now_made = recipe.made(settings)
    if fix and module.patched is None:
        raise UsageError(
            f"{module.reason} to {recipe.module}, so this would be the installed source",
            where=str(file),
            fix="remove the file, or name its configs in the settings again",
        )
    lines = unified_diff(
        text.splitlines(keepends=True), now_made.splitlines(keepends=True), str(file), f"{file} (now)"
    )
    diff = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
    if diff and fix:
        write_file(file, now_made, "the generated file")
        output.note(f"wrote {file}")
    verdict = SAME if now_made == text else FIXED if fix else DIFFERS
    return {"file": str(file), "module": recipe.module, "verdict": verdict, "diff": diff}


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"it cannot be read: {error}", where=str(file), fix="name a file of `dump`"
        ) from error
