"""The slots that modules of a class use, found in the methods of the class and in the patched source."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from veomni_hook.kernels.explain.replacements import overridden
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.guards import Guard, guards_of

__all__ = ["Place", "places_of"]


class Place(NamedTuple):
    """A slot that modules of a class use, its name there, and its guards with their classes."""

    name: str
    slot: Slot
    guards: tuple[tuple[type, Guard], ...]


def places_of(kind: type) -> list[Place]:
    """Return the slots that modules of ``kind`` use, or would use if no method had been replaced."""
    guards: dict[str, list[tuple[type, Guard]]] = {}
    slots = dict(_slots_of(kind))
    for base, guard in guards_of(kind):
        if not overridden(guard, base, kind):
            slots.setdefault(guard.name, guard.slot)
            guards.setdefault(guard.name, []).append((base, guard))
    return [Place(name, slot, tuple(guards.get(name, ()))) for name, slot in slots.items()]


def _slots_of(kind: type) -> list[tuple[str, Slot]]:
    """Return the slots, by name, that the methods of the module class ``kind`` use, inherited ones too."""
    slots: dict[str, Slot] = {}
    methods = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    for method in methods.values():
        if callable(method):
            function = inspect.unwrap(method)
            code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            names = () if code is None else code.co_names
            slots.update((name, scope[name]) for name in names if isinstance(scope.get(name), Slot))
    return list(slots.items())
