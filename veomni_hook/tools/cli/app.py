"""The application: all commands, and what they share (errors, warnings, broken pipes).

A command's module is imported when that command is run, completed, or described in the help. This module
does not import torch or transformers.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from veomni_hook import __version__
from veomni_hook.errors import VeomniHookError
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.usage import WRONG_USE, UsageError, exit_status

HIDDEN = "hidden"
#: The location of each command, by its part of the list: a function, or a typer application with subcommands.
PANELS = {
    "Try": {
        "demo": "veomni_hook.tools.cli.demo.command:demo",
        "run": "veomni_hook.tools.cli.run.command:run",
        "compare": "veomni_hook.tools.cli.compare:compare",
        "plan": "veomni_hook.tools.cli.plan:plan",
    },
    "Look": {
        "list": "veomni_hook.tools.cli.list.command:list_",
        "explain": "veomni_hook.tools.cli.explain:explain",
        "dump": "veomni_hook.tools.cli.dump:dump",
        "diff": "veomni_hook.tools.cli.diff:diff",
        "report": "veomni_hook.tools.cli.report:report",
    },
    "Maintain": {
        "check": "veomni_hook.tools.cli.check.command:check",
        "migrate": "veomni_hook.tools.cli.migrate:migrate",
        "cache": "veomni_hook.tools.cli.cache.command:app",
        "doctor": "veomni_hook.tools.cli.doctor:doctor",
    },
    HIDDEN: {"bench": "veomni_hook.tools.cli.bench:bench"},
}
COMMANDS = {name: where for commands in PANELS.values() for name, where in commands.items()}
#: What earlier commands are now.
MOVED = {
    "coverage": "`veomni-hook list FAMILY`, or `veomni-hook list --by site` for all",
    "kernels": "`veomni-hook explain` for all ops, `veomni-hook explain qwen3` for the places of a model",
    "completion": "`veomni-hook --show-completion` or `veomni-hook --install-completion`",
}


class Group(TyperGroup):
    """Finds the commands, and converts this package's errors to a message and an exit status."""

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names of the commands, in the order used in the help."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return the command with this name; None if there is none."""
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            command = self.commands[cmd_name] = _load(cmd_name)
            command.rich_help_panel = next(panel for panel, names in PANELS.items() if cmd_name in names)
            command.hidden = command.rich_help_panel == HIDDEN
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name; the error for an unknown one suggests similar ones."""
        if args and args[0] in MOVED:
            what = f"there is no command {args[0]!r} any more"
            raise UsageError(what, where="the command line", fix=f"use {MOVED[args[0]]}")
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            for name in COMMANDS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        warnings.showwarning = lambda message, *_, **__: output.warn(str(message))
        try:
            return super().invoke(ctx)
        except VeomniHookError as error:
            output.fail(error)
            raise typer.Exit(exit_status(error)) from None
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            fix = "pip install torch; list, dump, diff, check, doctor and explain --system work without it"
            output.fail(UsageError("this command needs torch", where="this Python environment", fix=fix))
            raise typer.Exit(WRONG_USE) from None
        except BrokenPipeError:
            output.abandon_stdout()
            raise typer.Exit(output.BROKEN_PIPE) from None


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        output.emit(f"veomni-hook {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Patch the modeling code of Hugging Face transformers in memory, as it is imported.

    A family is a model of transformers, such as qwen3.

    Exit status: 0: success, 1: a check found a problem, 2: wrong use of a command.
    """


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    implementation = getattr(import_module(module), attribute)
    if isinstance(implementation, typer.Typer):
        group: Any = typer.main.get_command(implementation)
        group.name = name
        for command in group.commands.values():
            command.help = _flowing(command.help)
        return group
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    one.command(name, cls=getattr(implementation, "command_class", TyperCommand))(implementation)
    command = typer.main.get_command(one)
    command.help = _flowing(command.help)
    return command


def _flowing(text: str | None) -> str:
    """A help text with one line per paragraph, for the terminal to wrap; indented lines are kept."""
    paragraphs = (text or "").split("\n\n")
    return "\n\n".join(one if "\n " in one or "\b" in one else " ".join(one.split()) for one in paragraphs)


def main() -> None:
    """Run the command line; the console script's entry point."""
    app(prog_name="veomni-hook")
