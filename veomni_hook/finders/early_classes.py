"""Modules that were imported before the hook: those whose classes nothing uses wait until something does.

Libraries import modeling modules for a function alone, as PEFT does, and no model misses a patch there. So
the warning comes when a class of the module is used: at once if such a module object exists, else when the
first is made. torch tells of every module object that becomes part of another; no class is changed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from veomni_hook.finders.already_imported import report
from veomni_hook.finders.log import note
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import SHARED, TRAINING

__all__ = ["report_used"]


def report_used(names: Iterable[str]) -> None:
    """Report unpatched modules, those with unused classes of module objects when one of these is used.

    Raises:
        AlreadyImportedError: in strict mode, now or when the first module object is made.
    """
    names = list(names)
    waiting = set()
    for name in {*names} - SHARED.keys() - TRAINING.keys():
        kinds = [kind for kind in list(vars(sys.modules[name]).values()) if isinstance(kind, type)]
        if any(name in _homes(kind) for kind in kinds):
            waiting.add(name)
    if waiting:
        # What holds a module object is not known, so all objects are looked at: 30 ms for a million.
        waiting -= {home for kind in set(map(type, gc.get_objects())) for home in _homes(kind)}
    if waiting:
        note(f"imported too early to be patched, and not used yet: {', '.join(sorted(waiting))}")
        if not STATE.unused:
            _watch()
        STATE.unused = waiting
    report(name for name in names if name not in waiting)


def _homes(kind: type) -> list[str]:
    """Return the modules of the bases of a class of module objects; none for any other class."""
    torch: Any = sys.modules.get("torch.nn")
    if torch is None or torch.Module not in kind.__mro__:
        return []
    return [base.__module__ for base in kind.__mro__]


def _watch() -> None:
    from torch.nn.modules.module import register_module_module_registration_hook

    seen: set[type] = set()

    def look(parent: object, name: str, child: object) -> None:
        kinds = {type(parent), type(child)} - seen
        seen.update(kinds)
        used = STATE.unused.intersection(home for kind in kinds for home in _homes(kind))
        STATE.unused = STATE.unused - used if STATE.handles else set()
        if not STATE.unused:
            hook.remove()
        if STATE.handles:
            report(used)

    hook = register_module_module_registration_hook(look)
