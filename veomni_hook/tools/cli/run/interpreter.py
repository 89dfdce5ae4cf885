"""This environment's Python as `veomni-hook run` starts it: its path and its flags."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from veomni_hook.tools.cli.usage import UsageError

#: Flags that make Python ignore the environment, which carries the hook.
_DEAF = ("-I", "-E", "-S")
#: Flags whose value may be the next word.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def python() -> list[str]:
    """Return the command that starts this interpreter with the flags of this process.

    Raises:
        UsageError: the interpreter's path is unknown, or a flag makes it ignore the environment.
    """
    if not sys.executable:
        raise UsageError(
            "the path of this Python is unknown", where="sys.executable", fix="start it by its full path"
        )
    return [sys.executable, *interpreter_flags()]


def interpreter_flags() -> list[str]:
    """Return the flags that this interpreter was started with, for the process that replaces it.

    Raises:
        UsageError: a flag makes Python ignore the environment, which carries the hook.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        flags.append("-u")
    # A console script's first line may contain -I, -E, -s or -P: chosen by the installer, not the user.
    if getattr(sys.modules["__main__"], "__spec__", None) is None:
        return [flag for flag in flags if flag not in (*_DEAF, "-s", "-P")]
    _refuse([flag for flag in flags if flag in _DEAF], "the flags of this interpreter")
    return flags


def refuse_deaf_flags(arguments: Sequence[str]) -> None:
    """Check the flags that the user typed after `python`.

    Raises:
        UsageError: one of them makes Python ignore the environment.
    """
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word == "-":
            return
        if word in _WITH_VALUE:
            next(words, None)
            continue
        letters = "" if word.startswith("--") else word[1:]
        own = letters[: next((at for at, letter in enumerate(letters) if letter in "cmWX"), len(letters))]
        _refuse([f"-{letter}" for letter in own if f"-{letter}" in _DEAF], f"python {word}")
        if letters[len(own) :][:1] in ("c", "m"):
            return


def _refuse(deaf: list[str], where: str) -> None:
    if deaf:
        raise UsageError(
            f"python {' '.join(deaf)} ignores the environment variables that activate the hook",
            where=where,
            fix="start without this flag, or put `import veomni_hook.install` at the top of the script",
        )
