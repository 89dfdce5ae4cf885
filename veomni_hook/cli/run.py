"""`veomni-hook run`: a script or module, started by a fresh interpreter in which the hook is already active.

The process is replaced, not imitated: `sys.argv`, `sys.path[0]`, `__main__`, exit status, signals and
tracebacks are Python's own. The hook travels in the environment, so every Python that the script starts
(spawn, forkserver, torchrun's workers) has it too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from veomni_hook.cli import output
from veomni_hook.cli.usage import UsageError


class RunCommand(TyperCommand):
    """Takes its own options only up to the script or module: the rest belongs to that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with a `--` where the script's own arguments begin."""
        return super().parse_args(ctx, separated(args))


def separated(args: list[str]) -> list[str]:
    """Return the arguments with a `--` in front of those that are not options of `run`."""
    for position, arg in enumerate(args):
        if arg == "--":
            return args
        if arg in ("-m", "--module"):
            return [*args[: position + 2], "--", *args[position + 2 :]]
        if arg.startswith("--module=") or (arg.startswith("-m") and not arg.startswith("--")):
            return [*args[: position + 1], "--", *args[position + 1 :]]
        if not arg.startswith("-"):
            return [*args[:position], "--", *args[position:]]
    return args


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.", show_default=False),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as `python -m` does."),
    ] = None,
) -> None:
    """Activate the hook, then run a script or module as `python` would.

    Child processes inherit the hook. Settings come from the environment and the settings file.
    """
    from veomni_hook.finders.children import environment
    from veomni_hook.settings import resolve

    arguments = command or []
    if module is None and not arguments:
        raise UsageError(
            "no script and no module",
            where="veomni-hook run",
            fix="name one: run script.py, or run -m package.module",
        )
    settings = resolve().settings
    if not settings.enabled:
        output.warn("the hook is switched off (VEOMNI_HOOK=0 or the settings file); running without it")
    target = arguments if module is None else ["-m", module, *arguments]
    replace_process([_interpreter(), *interpreter_flags(), *target], environment(settings))


run.command_class = RunCommand  # type: ignore[attr-defined]


def interpreter_flags() -> list[str]:
    """Return the flags that this interpreter was started with, for the one that takes its place.

    Raises:
        UsageError: a flag makes Python ignore the environment, through which the hook travels.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        flags.append("-u")
    # A console script's first line may carry -I, -E, -s or -P: the installer's choice, not the user's.
    if getattr(sys.modules["__main__"], "__spec__", None) is None:
        return [flag for flag in flags if flag not in ("-I", "-E", "-S", "-s", "-P")]
    deaf = [flag for flag in flags if flag in ("-I", "-E", "-S")]
    if deaf:
        raise UsageError(
            f"python {' '.join(deaf)} ignores the environment, through which the hook reaches the script",
            where="the flags of this interpreter",
            fix="start without them, or put `import veomni_hook.install` at the top of the script",
        )
    return flags


def replace_process(command: list[str], variables: dict[str, str]) -> None:
    """Turn this process into another program; does not return."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    environ = {**os.environ, **variables}
    if os.name == "nt":  # Windows' exec returns to the shell at once and loses the exit status
        raise SystemExit(subprocess.call(command, env=environ))
    os.execve(command[0], command, environ)


def _interpreter() -> str:
    if not sys.executable:
        raise UsageError(
            "this Python does not know where it is", where="sys.executable", fix="start it by its full path"
        )
    return sys.executable
