"""The line to write when a patch's code uses a name that the patched module lacks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.plan import Step
from veomni_hook.patches.spec import Patch, PositionedHelper

__all__ = ["remedy"]

_ANY = "provide it by add_helper, add_import or add_post_import_block"


def remedy(name: str, step: Step | None, existing: Collection[str]) -> str:
    """What to write for a name that the code of ``step`` uses.

    Args:
        name: the missing name.
        step: the step whose code uses it; None if unknown.
        existing: the names that this code could have meant.
    """
    namespace = {} if step is None else _namespace(step)
    if name in namespace:
        return f"{name}: {_as_added(name, namespace[name], namespace.get('__name__'))}"
    close = nearest(name, existing)
    return f"{name}: " + (f"write {listed(close)}, or {_ANY}" if close else _ANY)


def _namespace(step: Step) -> Mapping[str, Any]:
    """The globals of the module in which the step's code was written; empty if unknown."""
    payload = step.payload.replacement if isinstance(step.payload, Patch) else step.payload
    written = payload.helper if isinstance(payload, PositionedHelper) else payload
    if callable(written):
        written = inspect.unwrap(written)
    found = getattr(written, "__globals__", None)
    if isinstance(found, dict):
        return found
    module = sys.modules.get(getattr(written, "__module__", None) or "")
    return {} if module is None else vars(module)


def _as_added(name: str, value: Any, written_in: str | None) -> str:
    if isinstance(value, ModuleType):
        alias = "" if value.__name__ == name else f", alias={name!r}"
        return f"config.add_import({value.__name__!r}{alias}, is_from_import=False)"
    home, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(home, str) and isinstance(own, str) and own.isidentifier()):
        return f"config.add_post_import_block(...) with the assignment of {name}"
    if home == written_in:
        return f"config.add_helper({name})"
    return f"config.add_import({home!r}, names=[{own if own == name else f'{own} as {name}'!r}])"
