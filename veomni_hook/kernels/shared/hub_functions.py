"""What a call of a function runs that transformers lets another package replace.

``@use_kernel_func_from_hub_with_fallback`` calls the function of a package if that is installed, else the one
below it; with the package ``kernels``, the hub may replace both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

from veomni_hook.kernels.shared.origin import name_of, underlying, written_in

__all__ = ["Held", "below", "installed_for", "is_upstreams", "running", "takes", "yields"]

_WRAPPER = "use_kernel_func_from_hub_with_fallback"
_HOMES = ("transformers.", "transformers_modules.")


class Held:
    """A package's function that upstream's layer holds in place of its own, as ``__init__`` has chosen."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def yields(owner: object, *operands: object) -> str | None:
    """Return the package's function that computes a call, because the user has installed it, or None.

    The last operand is the function that upstream calls.
    """
    function = running(operands[-1])
    return None if is_upstreams(function, owner) else f"{name_of(function)} computes it"


def is_upstreams(function: object, owner: object) -> bool:
    """Return whether a function, below its decorators, is the modeling file's own, replaced or not."""
    if type(function) is Held:
        return True
    home = written_in(below(function))[0]
    return home == type(owner).__module__ or home.startswith(_HOMES)


def below(function: object) -> Any:
    """Return the function of the modeling file below its decorators; any other object itself."""
    return _cell(_below_hub(function), "torch_function")


def running(function: Any) -> Any:
    """Return what a call of ``function`` runs: a package's function, a kernel of the hub, or its own body."""
    if type(function) is Held:
        return function.function
    installed = installed_for(function)
    return _cell(_below_hub(function), "implementation") if installed is None else installed


def installed_for(function: Any) -> Any:
    """Return the hub's kernel that ``kernelize`` has put in a function's place; None if there is none.

    The package ``kernels`` turns a function into a module without weights, and replaces its ``forward``.
    """
    if not _is_of_hub(function):
        return None
    forward = vars(function).get("forward")
    return None if getattr(forward, "__func__", forward) is type(function).forward else forward


@lru_cache(maxsize=64)
def takes(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(underlying(function)).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _is_of_hub(function: object) -> bool:
    return hasattr(type(function), "kernel_layer_name")


def _below_hub(function: Any) -> Any:
    """Return the function that the package ``kernels`` has made a module of; any other object itself."""
    if not _is_of_hub(function):
        return function
    cells = [cell.cell_contents for cell in type(function).forward.__closure__ or ()]
    functions = [content for content in cells if type(content) is FunctionType]
    return functions[0] if len(functions) == 1 else function


def _cell(function: Any, name: str) -> Any:
    """Return a value that transformers' wrapper has closed over; any other function itself."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars or _WRAPPER not in code.co_qualname:
        return function
    return function.__closure__[code.co_freevars.index(name)].cell_contents
