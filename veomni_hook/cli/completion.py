"""`veomni-hook completion`: the shell script that completes commands, options, families and ops."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer import completion as typer_completion

from veomni_hook.cli import output

PROGRAM = "veomni-hook"
VARIABLE = "_VEOMNI_HOOK_COMPLETE"


class Shell(StrEnum):
    """A shell with completion support."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="Your shell.", show_default=False)],
) -> None:
    """Print the completion script of a shell: for commands, options, families, modules and ops.

    bash: add to ~/.bashrc: eval "$(veomni-hook completion bash)"

    zsh: add to ~/.zshrc, after compinit: eval "$(veomni-hook completion zsh)"

    fish: veomni-hook completion fish > ~/.config/fish/completions/veomni-hook.fish
    """
    script: str = typer_completion.get_completion_script(  # type: ignore[attr-defined]
        prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value
    )
    output.emit(f"{script}\n")
