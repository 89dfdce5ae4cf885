"""Where a function was written, read from its code and globals, because decorators copy ``__module__``."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

__all__ = ["definition_of", "home_of", "name_of", "names_in", "underlying", "written_in"]


def written_in(function: Any) -> tuple[str, str]:
    """Return the module in which a function was written, and its name there.

    For objects that are not functions, those of their class.
    """
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return str(type(function).__module__), type(function).__qualname__
    return str(function.__globals__.get("__name__", "")), str(code.co_qualname)


def definition_of(function: Any) -> ast.FunctionDef:
    """Return the definition of a function or of code, without what decorators have put around it.

    Raises:
        OSError, TypeError: its text is not known.
        SyntaxError: its text is not a definition of a function.
    """
    node, *more = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    if more or not isinstance(node, ast.FunctionDef):
        raise SyntaxError(f"{function} is not defined by def")
    return node


def name_of(function: object) -> str:
    """Return ``module.qualname`` of what a callable runs, or of a class."""
    function = underlying(function)
    if isinstance(function, FunctionType):
        return f"{home_of(function)}.{function.__code__.co_qualname}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def home_of(function: object) -> str:
    """Return the name of the module that defines what a callable runs, or a class."""
    function = underlying(function)
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__", "?"))
    return str(getattr(function, "__module__", None) or "?")


def underlying(function: object) -> Any:
    """Return what bound, static and class methods and partial objects call."""
    while isinstance(function, (MethodType, partial, staticmethod, classmethod)):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def names_in(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function's code names, including nested functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names
