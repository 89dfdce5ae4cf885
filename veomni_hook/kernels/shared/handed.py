"""Calls of models that hand boundaries of samples to their layers, as long as they run.

A layer whose forward was replaced may drop arguments. Without boundaries its samples would leak.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

from veomni_hook.errors import SamplesError

__all__ = ["Handed", "check", "forget", "hand"]


class Handed(dict[str, Any]):
    """The arguments of a model's layers. Its forward alone holds them: they live as long as it runs."""

    owner: Any
    thread: int


_RUNNING: WeakValueDictionary[int, Handed] = WeakValueDictionary()


def hand(owner: object, arguments: Mapping[str, object]) -> Handed:
    """Return arguments with boundaries, and note that the layers of the model ``owner`` have to get them."""
    handed = Handed(arguments)
    handed.owner, handed.thread = owner, get_ident()
    _RUNNING[id(owner)] = handed
    return handed


def forget(owner: object) -> None:
    """Forget an earlier call of the model ``owner``: a traceback may hold its forward."""
    if _RUNNING:
        _RUNNING.pop(id(owner), None)


def check(layer: object, name: str) -> None:
    """Raise SamplesError if a model that runs has handed boundaries to ``layer``, which did not get them.

    Args:
        layer: the module that calls an op without boundaries.
        name: what the error calls it.
    """
    if not _RUNNING:
        return
    for handed in _RUNNING.values():
        if handed.thread == get_ident() and any(module is layer for module in handed.owner.modules()):
            raise SamplesError(
                "samples share a row, and the layer did not get their boundaries from its forward",
                where=name,
                fix="hand on all keyword arguments in the forward that you put in place of the layer's",
            )
