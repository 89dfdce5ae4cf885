"""What replaces a guarded method now: Liger's code, a hook of accelerate's, a subclass's method.

A guard in a replaced method is never asked. A wrapper may or may not call what it wraps; only recorded calls
show which. So wrappers are named, and nothing is concluded from them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from veomni_hook.kernels.shared.origin import home_of, name_of, names_in, underlying
from veomni_hook.kernels.slot.guards import Guard, module_of, slots_in

__all__ = ["Replacement", "replacement_of"]

#: Packages whose decorators wrap methods in installed modeling code.
_UPSTREAM = ("torch", "transformers", "veomni_hook")
#: How many objects behind a function are searched; wrappers are only a few levels deep.
_REACH = 200
#: How many levels of calls by name are followed.
_NAMED = 2


class Replacement(NamedTuple):
    """A function that replaces a guarded one: its full name, and whether it refers to the guarded one."""

    name: str
    reaches: bool


def replacement_of(guard: Guard, base: type, kind: type, owner: object = None) -> Replacement | None:
    """Return what replaces ``guard``, patched into ``base``, for modules of class ``kind``.

    Args:
        guard: a guard of a method of ``base``, which is ``kind`` or a base of it.
        base: the class that it was patched into.
        kind: the class of the modules.
        owner: one of these modules, which may have its own method; None: any.

    Returns:
        None if the guard is still in place.
    """
    own = None if owner is None else vars(owner).get(guard.method)
    if own is None:
        first = _first(guard, base, kind)
        if first is base or not _is_patched(first):
            own = vars(first).get(guard.method)
    if own is not None and not _is_upstream(own, guard):
        return Replacement(name_of(own), _leads(own, guard, kind, owner))
    module = sys.modules.get(base.__module__)
    return _called(guard, module) if guard.function and module is not None else None


def overridden(guard: Guard, base: type, kind: type) -> bool:
    """Return whether upstream's own patched code overrides the method without calling the guarded one."""
    first = _first(guard, base, kind)
    method = vars(first).get(guard.method)
    return first is not base and _is_patched(first) and not _leads(method, guard, kind, None)


def _first(guard: Guard, base: type, kind: type) -> type:
    """Return the class that provides the guarded method for modules of ``kind``."""
    return next((base_ for base_ in kind.__mro__ if guard.method in vars(base_)), base)


def _is_patched(kind: type) -> bool:
    module = module_of(kind)
    return module is not None and bool(slots_in(module))


def _called(guard: Guard, module: ModuleType) -> Replacement | None:
    """Return what replaces the function whose calls the slot wraps, or None; it is called as it is."""
    function = vars(module).get(guard.function)
    if not isinstance(function, FunctionType) or function.__globals__ is vars(module):
        return None
    if function.__module__ == module.__name__ and _root(function) in (*_UPSTREAM, "kernels"):
        return None  # an upstream decorator
    return Replacement(name_of(function), reaches=False)


def _root(function: object) -> str:
    return home_of(function).partition(".")[0]


def _is_guarded(function: object, guard: Guard) -> bool:
    return (
        isinstance(function, FunctionType)
        and function.__globals__.get(guard.name) is guard.slot
        and guard.name in names_in(function.__code__)
        and guard.slot.serves(function)
    )


def _is_upstream(value: object, guard: Guard) -> bool:
    """Return whether ``value`` is the guarded function, possibly below upstream decorators only."""
    function = underlying(value)
    while not _is_guarded(function, guard):
        inner = getattr(function, "__wrapped__", None)
        if inner is None or isinstance(value, partial) or _root(function) not in _UPSTREAM:
            return False
        function = underlying(inner)
    return True


def _leads(function: object, guard: Guard, kind: type, owner: object) -> bool:
    """Return whether ``function`` refers to the guarded function: wraps it, closes over it, or names it."""
    waiting, seen = [(function, 0)], set[int]()
    while waiting and len(seen) < _REACH:
        one, depth = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if _is_guarded(underlying(one), guard):
            return True
        waiting += [(function, depth) for function in _wrapped(one) if callable(function)]
        if isinstance(one, FunctionType) and depth < _NAMED:
            waiting += [(function, depth + 1) for function in _named(one, guard, kind, owner)]
    return False


def _wrapped(one: object) -> Iterator[Any]:
    """Yield the objects that a wrapper holds."""
    yield getattr(one, "__wrapped__", None)
    if isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, (MethodType, staticmethod, classmethod)):
        yield one.__func__
    elif isinstance(one, FunctionType):
        yield from (cell.cell_contents for cell in one.__closure__ or () if cell != CellType())
        yield from one.__defaults__ or ()
        yield from (one.__kwdefaults__ or {}).values()
    elif not isinstance(one, type) and hasattr(one, "__dict__"):
        yield from vars(one).values()


def _named(function: FunctionType, guard: Guard, kind: type, owner: object) -> Iterator[Any]:
    """Yield the functions that a function may call by name: globals, and methods of the module."""
    # Without copies of methods: they run only where the method is not edited.
    names = {name for name in names_in(function.__code__) if not name.startswith("veomni_")}
    spaces = [function.__globals__, *map(vars, kind.__mro__), {} if owner is None else vars(owner)]
    if names.isdisjoint({"super", *(base.__name__ for base in kind.__mro__)}):
        names.discard(guard.method)  # another module's, as in self.mlp.forward(x)
    for name in names:
        values = (space[name] for space in spaces if name in space)
        yield from (value for value in values if isinstance(value, (FunctionType, MethodType, partial)))
