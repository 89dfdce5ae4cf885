"""The command to execute for the words after `veomni-hook run`.

A Python script, `python …`, a console script of this environment, or any other program. A command that uses
this environment's Python is started with this interpreter, so it gets the interpreter's flags and the hook;
any other command is executed unchanged, with the hook in its environment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.usage import UsageError

__all__ = ["command_of"]

#: Files that Python runs, regardless of the first line.
_PYTHON_FILES = (".py", ".pyw", ".pyc", ".pyz", ".zip")
_SHELL_FILES = (".sh", ".bash", ".zsh", ".ksh", ".csh", ".fish")
_PYTHON = re.compile(r"python(?P<version>\d+(\.\d+)?)?(\.exe)?", re.IGNORECASE)
#: The first lines of a console script if the interpreter's path is too long for one line or has spaces.
_EXEC_LINE = re.compile(rb"#!/bin/sh\r?\n'''exec' (?P<command>[^\r\n]+)")
_EXECUTABLE_ENDING = ".exe" if os.name == "nt" else ""


def command_of(words: Sequence[str], module: str | None = None) -> list[str]:
    """Return the command for the words that the user typed.

    Args:
        words: a script, program or `python`, with its arguments; at least one word. A file with that name has
            priority over a program, and a program of this environment over one on PATH.
        module: run this module as `python -m` does; the words are its arguments.

    Raises:
        UsageError: there is no such script or program, or it cannot run with the hook.
    """
    if module is not None:
        return [*python(), "-m", module, *words]
    name, *arguments = words
    found = _python(name, arguments) or _file(name) or _program(name)
    if found is None and os.path.isfile(os.path.join(name, "__main__.py")):
        found = [*python(), name]
    if found is None:
        raise _not_found(name)
    return [*found, *arguments]


def _python(name: str, arguments: Sequence[str]) -> list[str] | None:
    """The interpreter that the user named; without a folder or another version, it is the current one."""
    named = _PYTHON.fullmatch(os.path.basename(name))
    if named is None or (os.path.dirname(name) and not _is_program(name)):
        return None
    refuse_deaf_flags(arguments)
    if os.path.dirname(name):
        return python() if _is_own(name) else [name]
    major, minor = sys.version_info[:2]
    if named["version"] in (None, f"{major}", f"{major}.{minor}"):
        return python()
    other = shutil.which(name)
    return None if other is None else [other]


def _file(path: str) -> list[str] | None:
    """A file at this path, but not a folder: Python's, unless it says that it is something else."""
    if not os.path.isfile(path):
        # A pipe (`<(...)`, /dev/stdin) is Python source that only Python itself may read.
        return [*python(), path] if os.path.exists(path) and not os.path.isdir(path) else None
    if path.lower().endswith(_PYTHON_FILES):
        return [*python(), path]
    head = _head(path)
    line = _first_line(head)
    if line:
        if _runs_python(line):
            foreign = os.path.isabs(line[0]) and not _is_env(line[0]) and not _is_own(line[0])
            return _as_it_is(path) if foreign else [*python(), path]
        return _as_it_is(path) if _is_program(path) else [*line, path]
    if b"\0" in head and _is_program(path):
        return [os.path.abspath(path)]
    if path.lower().endswith(_SHELL_FILES):
        raise UsageError(
            f"{path} is a shell script, and its first line does not say for which shell",
            where=os.path.abspath(path),
            fix=f"name the shell: veomni-hook run bash {path}",
        )
    return [*python(), path]


def _program(name: str) -> list[str] | None:
    """A console script of this environment, or a program on PATH."""
    if os.path.dirname(name) or name.lower().endswith(_PYTHON_FILES):
        return None
    for folder in _script_folders():
        path = os.path.join(folder, name + _EXECUTABLE_ENDING)
        if os.path.isfile(path):
            if _runs_python(_first_line(_head(path))):
                return [*python(), path]
            return _entry_point(name) or [path]
    path = shutil.which(name) or ""
    if not path:
        return _entry_point(name)
    line = _first_line(_head(path))
    return [*python(), path] if _runs_python(line) and _is_own(line[0]) else _as_it_is(path)


def _entry_point(name: str) -> list[str] | None:
    """A console script known only by its entry point, as on Windows, where the file is a program."""
    from importlib.metadata import entry_points

    for point in entry_points(group="console_scripts", name=name):
        function = f"{point.module}.{point.attr}()" if point.attr else point.module
        code = f"import sys, {point.module}; sys.argv[0] = {name!r}; sys.exit({function})"
        return [*python(), "-c", code]
    return None


def _as_it_is(path: str) -> list[str]:
    """A file that is executed directly; a note says so if it uses another environment's Python."""
    line = _first_line(_head(path))
    if _runs_python(line) and not _is_env(line[0]) and not _is_own(line[0]):
        output.warn(
            f"{path} runs on {line[0]}, not on this environment's Python ({sys.executable}): it has the hook"
            " only if veomni-hook is installed there"
        )
    return [os.path.abspath(path)]


def _script_folders() -> Iterator[str]:
    """The folders with this environment's console scripts."""
    yield sysconfig.get_path("scripts")
    if site.ENABLE_USER_SITE:
        yield sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1024)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", where=os.path.abspath(path), fix="make it readable"
        ) from error


def _first_line(head: bytes) -> list[str]:
    """The interpreter that the first line names, with its arguments; empty if there is none."""
    wrapped = _EXEC_LINE.match(head)
    if wrapped is not None:
        return shlex.split(os.fsdecode(wrapped["command"]))[:1]
    if not head.startswith(b"#!"):
        return []
    return os.fsdecode(head.splitlines()[0][2:]).split()


def _runs_python(line: Sequence[str]) -> bool:
    """Whether the interpreter in a first line is Python, directly or through `env`."""
    words = list(line)
    if words and _is_env(words[0]):
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return bool(words) and _PYTHON.fullmatch(os.path.basename(words[0])) is not None


def _is_env(program: str) -> bool:
    return os.path.basename(program) == "env"


def _is_own(interpreter: str) -> bool:
    """Whether an interpreter is this environment's; links are not followed, as its Python may be a link."""
    folder = os.path.dirname(os.path.abspath(interpreter))
    return os.path.normcase(folder) == os.path.normcase(os.path.dirname(sys.executable))


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _not_found(name: str) -> UsageError:
    from veomni_hook.patches.code.nearest_names import nearest

    looked = [f"the file {os.path.abspath(name)}"]
    known = {one.name for one in os.scandir() if one.name.endswith(".py")}
    if not os.path.dirname(name) and not name.lower().endswith(_PYTHON_FILES):
        folders = list(_script_folders())
        looked += [f"a program in {folder}" for folder in folders]
        looked.append("a program on PATH")
        for folder in filter(os.path.isdir, folders):
            known |= {one.name.removesuffix(_EXECUTABLE_ENDING) for one in os.scandir(folder)}
    near = nearest(name, known)
    meant = f"check the name (nearest: {', '.join(near)})" if near else "check the name"
    return UsageError(
        f"there is no script and no program {name!r}",
        where=f"looked for: {', '.join(looked)}",
        fix=f"{meant}; a module is run with -m: veomni-hook run -m package.module",
    )


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
