"""Where patches are declared, as ``file:line`` for messages and tracebacks."""

from __future__ import annotations

import sys

__all__ = ["place_of_caller", "place_of_code"]

_LANGUAGE = (
    "veomni_hook.patches.mappings",
    "veomni_hook.patches.patchgen",
    "veomni_hook.patches.records",
    "veomni_hook.patches.spec",
)


def place_of_caller() -> str:
    """Return ``file:line`` of the code that calls the patch language, where a patch is declared."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _LANGUAGE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_code(found: object) -> str:
    """Where a function or class is defined, if the object records it (classes: since Python 3.13)."""
    found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    code = getattr(found, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    line = getattr(found, "__firstlineno__", None)
    file = getattr(sys.modules.get(getattr(found, "__module__", "")), "__file__", None)
    return f"{file}:{line}" if line and file else ""
