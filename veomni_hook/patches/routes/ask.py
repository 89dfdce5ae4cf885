"""The text of a guard: it asks a slot, and returns what the kernel computes."""

from __future__ import annotations

from collections.abc import Sequence

from veomni_hook.patches.routes.splice import free_name
from veomni_hook.patches.text.document import FunctionNode

__all__ = ["ask", "tuple_of"]

_LINE = 80


def ask(
    function: FunctionNode, slot: str, receiver: str, operands: Sequence[str], tests: Sequence[str] = ()
) -> str:
    """Statements that return what a kernel computes, if the slot has one; without indentation.

    Args:
        function: the function that they go into.
        slot: the slot's name.
        receiver: what the function calls its module.
        operands: what the slot and the kernel are asked with, as source text.
        tests: what has to hold before; operands are looked up only where all do.
    """
    kernel, given = free_name(function, "kernel"), free_name(function, "operands")
    lines = [
        f"{given} = {tuple_of(operands)}",
        f"if ({kernel} := {slot}.kernel({receiver}, *{given})) is not None:",
        f"    return {kernel}(*{given})",
    ]
    code = "\n".join(lines)
    if not tests:
        return code
    said = [f"({test})" if len(tests) > 1 and " or " in test else test for test in tests]
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    return f"if {' and '.join(said)}:\n{indented}"


def tuple_of(values: Sequence[str]) -> str:
    """A tuple, in one line if it is short."""
    text = f"({', '.join(values)}{',' if len(values) == 1 else ''})"
    return text if len(text) <= _LINE else "(\n" + "".join(f"    {value},\n" for value in values) + ")"
