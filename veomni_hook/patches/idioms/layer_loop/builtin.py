"""What Python's own functions do with the positions of values."""

from __future__ import annotations

import ast
from collections.abc import Callable

from veomni_hook.patches.code.tree import last_name
from veomni_hook.patches.idioms.layer_loop.known_names import LOOPS, NUMBERS, QUESTIONS
from veomni_hook.patches.idioms.layer_loop.values import (
    PLAIN,
    SLICE,
    Items,
    Many,
    Plain,
    Size,
    Tensor,
    Value,
    Whole,
    of_all,
    tensor_like,
)
from veomni_hook.patches.site import Code, Missed

__all__ = ["builtin"]


def builtin(name: str, arguments: list[Value], node: ast.Call) -> Value:
    """The result of a call of a function of Python.

    Raises:
        Missed: it is not followed, or needs values of positions.
    """
    first = arguments[0] if arguments else PLAIN
    if name == "isinstance" and isinstance(first, Tensor) and last_name(node.args[1]) == "tuple":
        return Plain(False)
    if name in QUESTIONS:
        return PLAIN
    if name in _LISTS:
        return _LISTS[name](arguments)
    if name not in (*NUMBERS, *LOOPS, "getattr", "slice"):
        raise Missed(f"it calls {name}, which is not followed")
    for value in arguments if name == "slice" else of_all(arguments):
        if isinstance(value, Whole) and name == "getattr":
            return value
        if isinstance(tensor_like(value), Tensor):
            raise Missed(f"{name} of values of some positions", code=Code.MIXES_POSITIONS)
    kept = first if name in LOOPS and isinstance(first, Items | Many) else PLAIN
    return SLICE if name == "slice" else kept


def _length(arguments: list[Value]) -> Value:
    """What ``len`` gives."""
    if isinstance(arguments[0], Tensor):
        return Size(arguments[0].dims[0])
    return Plain(len(arguments[0].values)) if isinstance(arguments[0], Items) else PLAIN


def _numbered(arguments: list[Value]) -> Value:
    """What ``enumerate`` gives."""
    value = arguments[0]
    if not isinstance(value, Items):
        return _zipped([PLAIN, value if isinstance(value, Tensor | Many | Whole) else PLAIN])
    numbers = (PLAIN if arguments[1:] else Plain(number) for number in range(len(value.values)))
    return _zipped([Items(tuple(numbers)), value])


def _zipped(arguments: list[Value]) -> Value:
    """What ``zip`` gives."""
    if any(isinstance(value, Tensor) for value in arguments):
        raise Missed("a loop over positions", code=Code.MIXES_POSITIONS)
    if all(isinstance(value, Items) for value in arguments):
        rows = zip(*(value.values for value in arguments if isinstance(value, Items)), strict=False)
        return Items(tuple(Items(row) for row in rows))
    if any(isinstance(value, Items) for value in arguments):
        raise Missed("a loop that is not followed")
    return Many(Items(tuple(value.value if isinstance(value, Many) else value for value in arguments)))


_LISTS: dict[str, Callable[[list[Value]], Value]] = {
    "enumerate": _numbered,
    "len": _length,
    "list": lambda arguments: arguments[0] if arguments else PLAIN,
    "tuple": lambda arguments: arguments[0] if arguments else PLAIN,
    "zip": _zipped,
}
