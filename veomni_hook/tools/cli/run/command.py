"""`veomni-hook run`: start a script, module or program so that every Python process in it has the hook.

The process is replaced, not emulated: `sys.argv`, `sys.path[0]`, `__main__`, exit status, signals and
tracebacks are Python's own. The hook is passed in the environment, so every Python started from there (spawn,
forkserver, torchrun's workers, from a shell script) has it too. `commands` determines the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.options import ModuleOption
from veomni_hook.tools.cli.run.forwarding import ForwardingCommand
from veomni_hook.tools.cli.usage import UsageError


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND [ARGS]...",
            help="A Python script, `python ...`, or any program, with its arguments.",
            show_default=False,
        ),
    ] = None,
    module: ModuleOption = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|gpu",
            help="Start the script or module in N processes of this machine, by torchrun. auto, gpu: one for"
            " each device.",
            show_default=False,
        ),
    ] = None,
    sp: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="N processes share each sequence, as VEOMNI_PARALLEL=sp=N says."
        ),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="N processes share the experts of a layer, as VEOMNI_PARALLEL=ep=N says."
        ),
    ] = None,
) -> None:
    """Run a command with the hook active in every Python process of it.

    Put it in front of what you type: `run train.py`, `run python -m pkg`, `run torchrun --nproc_per_node 2
    train.py`, `run accelerate launch train.py`, `run bash train.sh`. Settings come from the environment and
    the settings file.

    `run --nproc 8 --sp 2 train.py` is short for torchrun on one machine. For several machines, use torchrun
    itself: `run --sp 2 torchrun --nnodes 2 ... train.py`.
    """
    from veomni_hook.finders.children import environment
    from veomni_hook.settings import ENVIRONMENT
    from veomni_hook.tools.cli.run.processes import settings_with, several
    from veomni_hook.tools.cli.run.program import command_of

    arguments = command or []
    if module is None and not arguments:
        raise UsageError(
            "no script, module or program",
            where="veomni-hook run",
            fix="name one: run script.py, run -m package.module, or run torchrun script.py",
        )
    settings = settings_with({"sp": sp, "ep": ep})
    if not settings.enabled:
        output.warn("the hook is switched off (VEOMNI_HOOK=0 or the settings file); running without it")
    if nproc is None:
        program = command_of(arguments, module)
    else:
        program = several(arguments, module, nproc, settings)
    variables = environment(settings)
    if sp or ep:  # also `--sp 1`, which is stronger than a settings file
        variables[ENVIRONMENT["parallel"]] = settings.parallel or "none"
    replace_process(program, variables)


run.command_class = ForwardingCommand  # type: ignore[attr-defined]


def replace_process(command: list[str], variables: dict[str, str]) -> None:
    """Replace this process with another program; does not return.

    Raises:
        UsageError: the system cannot execute it.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    environ = {**os.environ, **variables}
    try:
        if os.name == "nt":  # Windows' exec returns to the shell at once and loses the exit status
            raise SystemExit(subprocess.call(command, env=environ))
        os.execve(command[0], command, environ)
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be executed: {error.strerror}",
            where=" ".join(command),
            fix="check that it is a program for this machine, and that what its first line names exists",
        ) from error
