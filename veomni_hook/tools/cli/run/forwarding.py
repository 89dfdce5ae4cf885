"""Commands that start the user's command: where their own options end and that command begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

__all__ = ["ForwardingCommand", "separated"]

#: The parameter whose option `-m` starts a module: everything after its value belongs to the module.
MODULE = "module"


class ForwardingCommand(TyperCommand):
    """Parses its own options only up to the script, module or program; the rest belongs to that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with a `--` inserted before the user's command."""
        return super().parse_args(ctx, separated(args, self.get_params(ctx)))


def separated(args: list[str], parameters: Sequence[Any]) -> list[str]:
    """Return the arguments with a `--` between the options of a command and the user's command.

    Args:
        args: the arguments.
        parameters: the command's parameters (click's); one of them is called `module`.
    """
    options = {name: parameter for parameter in parameters for name in parameter.opts if name.startswith("-")}
    position, module = 0, False
    while position < len(args) and args[position].startswith("-") and not module:
        if args[position] == "--":
            return args
        name, attached = _split(args[position])
        option = options.get(name)
        if option is None or option.is_flag:
            position += 1
        else:
            position += 1 if attached else 2
            module = option.name == MODULE
    return [*args[:position], "--", *args[position:]] if position < len(args) else args


def _split(word: str) -> tuple[str, bool]:
    """Return the option's name in a word, and whether its value is in the same word."""
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        return name, bool(equals)
    return word[:2], len(word) > 2
