"""Targets that configs import while they load: served unpatched and forgotten afterwards.

Configs may import transformers, even the module that they patch. A target that is imported while configs
load, and that one of them may be for, is served unpatched. Afterwards it is removed from `sys.modules`, so
that the next import finds the patched form.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType

from veomni_hook.errors import VeomniHookWarning

__all__ = ["LOADING", "forget", "serving_upstream", "unrecorded"]


class _Loading(threading.local):
    """What one thread does.

    Attributes:
        served: the targets that it imported unpatched while it loads configs; None when it is loading none.
        recorded: whether what it does is recorded (`veomni_hook.finders.recording`).
        loader: the frame that loads the configs that are recorded.
    """

    served: list[str] | None = None
    recorded = False
    loader: FrameType | None = None


LOADING = _Loading()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing in this block: what runs is not a config's."""
    recorded, LOADING.recorded = LOADING.recorded, False
    try:
        yield
    finally:
        LOADING.recorded = recorded


@contextmanager
def serving_upstream() -> Iterator[None]:
    """Serve targets unpatched within the block, and remove them from `sys.modules` after it."""
    if LOADING.served is not None:  # a config that loads configs
        yield
        return
    LOADING.served = []
    before = set(sys.modules)
    try:
        yield
    finally:
        served, LOADING.served = LOADING.served, None
        if served:
            forget(dict.fromkeys(served), set(sys.modules) - before)


def forget(names: Iterable[str], fresh: Collection[str] = ()) -> None:
    """Remove unpatched targets from `sys.modules` and from the places that cached a reference to them.

    transformers' lazy packages keep every resolved class as an attribute; those must be resolved again. An
    ordinary module that imported such a class keeps the unpatched one; a warning names it if it is one of
    transformers' own and ``fresh``, that is imported since.
    """
    gone = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    holders = []
    for holder_name, holder in list(sys.modules.items()):
        if not isinstance(holder, ModuleType):
            continue
        taken = [key for key, value in list(vars(holder).items()) if _comes_from(value, gone)]
        if not taken:
            continue
        lazy = hasattr(holder, "_class_to_module")  # transformers' lazy module resolves a name again
        for key in list(taken):
            if lazy or f"{holder_name}.{key}" in gone:
                delattr(holder, key)
                taken.remove(key)
        if taken and holder_name.startswith("transformers.") and holder_name in fresh:
            holders.append(f"{holder_name} ({', '.join(taken)})")
    if holders:
        warnings.warn(
            "imported by a patch config before its targets were patched, so they contain unpatched code: "
            + "; ".join(holders)
            + ". Import them in the config inside the functions that need them.",
            VeomniHookWarning,
            stacklevel=2,
        )


def _comes_from(value: object, modules: dict[str, ModuleType]) -> bool:
    # By type alone: reading an attribute of some objects warns (torch.distributed.reduce_op).
    if issubclass(type(value), ModuleType):
        return any(value is module for module in modules.values())
    if not issubclass(type(value), type | FunctionType):
        return False
    home = modules.get(getattr(value, "__module__", None) or "")
    return home is not None and vars(home).get(getattr(value, "__name__", "")) is value
