"""Classes for adopted modules, and how these are copied and pickled.

A copy of an adopted module is adopted. A pickle names the module's former class, because pickles refer to
classes by import path; so it can be loaded where this package is not installed.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Iterable
from typing import Any

__all__ = ["ADOPTED", "former_class", "subclass_for", "with_copies"]

#: The attribute of a class made for adopted modules: their former class.
ADOPTED = "_veomni_former_class"
# Pickles of any protocol refer to these, so they load without this package.
_NEW: Any = vars(copyreg)["__newobj__"]
_RECONSTRUCT: Any = vars(copyreg)["_reconstructor"]


def former_class(kind: type) -> type | None:
    """Return the former class of modules of an adopted class; None if ``kind`` is not one."""
    former: type | None = vars(kind).get(ADOPTED)
    return former


def subclass_for(kind: type, changed: Iterable[type]) -> type:
    """Return a class for modules of ``kind``, some of whose bases have ``changed`` forms.

    Members that ``kind`` defines itself override these, and its ``super()`` reaches them.
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    subclass: type = type(kind)(kind.__name__, (kind, *changed), names)
    return with_copies(subclass, kind)


def with_copies(replacement: type, former: type) -> type:
    """Add copying and pickling to a class that replaces ``former``, and return it."""

    bases: Any = super  # to mypy, `made` is not a class

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = bases(replacement, self).__reduce_ex__(max(int(protocol), 2))
        if type(self) is not replacement or reduced[:2] != (_NEW, (replacement,)):
            return reduced
        # Not `__newobj__`: pickle would compare the class with the object's.
        return (_RECONSTRUCT, (former, object, None), *reduced[2:])

    def __deepcopy__(self: object, memo: dict[int, object]) -> Any:
        new = memo[id(self)] = _empty(self)
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __copy__(self: Any) -> Any:
        new = _empty(self)
        new.__setstate__(dict(self.__getstate__()))
        return new

    for method in (__reduce_ex__, __deepcopy__, __copy__):
        if method is __reduce_ex__ or not hasattr(former, method.__name__):
            method.__qualname__ = f"{replacement.__qualname__}.{method.__name__}"
            setattr(replacement, method.__name__, method)
    setattr(replacement, ADOPTED, former)
    return replacement


def _empty(module: object) -> Any:
    kind: Any = type(module)
    return kind.__new__(kind)
