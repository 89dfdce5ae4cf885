"""The text of a guard: it asks a slot and returns the kernel's result."""

from __future__ import annotations

from collections.abc import Sequence

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.routes.splice import free_name

__all__ = ["ask", "tuple_of"]

_LINE = 80


def ask(
    function: FunctionNode, slot: str, receiver: str, operands: Sequence[str], tests: Sequence[str] = ()
) -> str:
    """Statements that return a kernel's result, if the slot has a kernel; without indentation.

    Args:
        function: the function that gets the statements.
        slot: the slot's name.
        receiver: the function's name for its module.
        operands: the arguments for the slot and the kernel, as source text.
        tests: preconditions; operands are evaluated only if all of them hold.
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
    """A tuple, on one line if it is short."""
    text = f"({', '.join(values)}{',' if len(values) == 1 else ''})"
    return text if len(text) <= _LINE else "(\n" + "".join(f"    {value},\n" for value in values) + ")"
