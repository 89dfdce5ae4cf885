"""Whether a function that a user put in place of upstream's calls upstream's after all.

A parameter for boundaries is then no proof that it keeps samples apart: in some releases upstream's functions
take all arguments, and ignore these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from veomni_hook.kernels.shared.hub_functions import running
from veomni_hook.kernels.shared.origin import names_in, underlying, written_in

__all__ = ["reached_upstream"]

_MODELS = ("transformers.models.", "transformers_modules.")
#: The names of upstream's convolutions and rules.
_MIXES = re.compile("conv1d|chunk")
#: Objects that are read, at most.
_MOST = 200


def reached_upstream(function: object, owner: object) -> Any:
    """Return upstream's convolution or rule that ``function`` names, closes over, holds or wraps, or None.

    A package's function that transformers calls in place of its own is not upstream's. Of functions, those of
    the same module are read.

    Args:
        function: what the user put in place of upstream's.
        owner: the module that calls it.
    """
    seen: set[int] = set()
    waiting, home = [function], written_in(underlying(function))[0]
    while waiting and len(seen) < _MOST:
        candidate = waiting.pop()
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if _mixes(runs := running(candidate), owner):
            return runs
        waiting += (inner for inner in _held(runs, home) if callable(inner))
    return None


def _mixes(function: object, owner: object) -> bool:
    if not isinstance(function, FunctionType):
        return False
    home, name = written_in(function)
    return (home == type(owner).__module__ or home.startswith(_MODELS)) and bool(_MIXES.search(name))


def _held(candidate: object, home: str) -> Iterator[Any]:
    """Yield what may be called when ``candidate`` is."""
    if isinstance(candidate, partial):
        yield from (candidate.func, *candidate.args, *candidate.keywords.values())
    elif isinstance(candidate, MethodType):
        yield from (candidate.__func__, candidate.__self__)
    elif isinstance(candidate, FunctionType):
        yield vars(candidate).get("__wrapped__")
        if written_in(candidate)[0] == home:
            yield from _named(candidate)
    elif not isinstance(candidate, type):
        yield vars(type(candidate)).get("__call__")
        yield from getattr(candidate, "__dict__", {}).values()


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield what a function's code may call: defaults, what it closes over, globals, what modules hold."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != CellType())
    names = names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, ModuleType):
            yield from (vars(value).get(attribute) for attribute in names)
