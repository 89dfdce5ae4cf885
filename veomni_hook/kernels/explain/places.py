"""The slots that modules of a class use, found in the methods of the class and in the patched source."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from veomni_hook.kernels.explain.replacements import overridden
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.guards import Guard, guards_of

__all__ = ["Place", "places_of"]

#: Modules whose classes are never patched: the beginnings of their names.
_WITHOUT = ("builtins", "torch.nn.modules.", "transformers.modeling_utils", "transformers.generation.")


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
    inside: dict[int, dict[str, Slot]] = {}  # by the identity of a function's globals
    # Methods of torch and of transformers' base classes hold no slots, and are most of a module's.
    bases = [base for base in reversed(kind.__mro__) if not base.__module__.startswith(_WITHOUT)]
    methods = {name: attribute for base in bases for name, attribute in vars(base).items()}
    for method in methods.values():
        if callable(method):
            function = inspect.unwrap(method)
            code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            if id(scope) not in inside:
                inside[id(scope)] = {name: value for name, value in scope.items() if isinstance(value, Slot)}
            known = inside[id(scope)]
            if known and code is not None:
                slots.update((name, known[name]) for name in code.co_names if name in known)
    return list(slots.items())
