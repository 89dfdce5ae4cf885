"""Calls of functions by their name, in the methods of a module's classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from veomni_hook.patches.code.expressions import last_name
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["calls_named"]


def calls_named(view: ModuleView, name: re.Pattern[str]) -> Iterator[tuple[str, ast.Call]]:
    """The first call in each method of a function or an attribute whose name has ``name`` in it.

    Yields:
        the method as ``Class.method``, and the call.
    """
    if name.search(view.document.source) is None:
        return
    for owner in view.classes.values():
        for method_name, method in view.methods(owner).items():
            calls = [each for each in walk_ast(method) if isinstance(each, ast.Call) and _is(each, name)]
            if calls:
                yield (
                    f"{owner.name}.{method_name}",
                    min(calls, key=lambda each: (each.lineno, each.col_offset)),
                )


def _is(call: ast.Call, name: re.Pattern[str]) -> bool:
    return name.search(last_name(call.func)) is not None
