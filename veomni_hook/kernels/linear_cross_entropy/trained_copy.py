"""Which module PEFT's wrapper of a fully trained module (``modules_to_save``) calls.

The wrapper holds the ``original_module`` and one copy for each adapter. It is recognised by this structure,
so that PEFT need not be imported. A wrong answer is harmless: `head.ask` accepts a loss only if the head's
call returns it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["called_by", "still_called"]


def called_by(module: Any) -> Any:
    """Return what ``module`` calls with its arguments, or ``module`` itself if it is no wrapper."""
    if not _wraps(module):
        return module
    original, copies = module.original_module, module.modules_to_save
    active = getattr(module, "active_adapter", None) or ()
    names = (active,) if isinstance(active, str) else tuple(active)
    if getattr(module, "disable_adapters", False) or not names or any(name not in copies for name in names):
        return original
    return copies[names[0]]


def still_called(head: nn.Module, linear: object) -> bool:
    """Return whether a call of ``head`` reaches ``linear``, as far as wrappers decide it."""
    wrappers = (each for each in head.modules() if _wraps(each) and _holds(each, linear))
    return all(_holds(called_by(each), linear) for each in wrappers)


def _wraps(module: object) -> bool:
    held = getattr(module, "_modules", {})
    return isinstance(held.get("modules_to_save"), nn.ModuleDict) and held.get("original_module") is not None


def _holds(module: Any, inner: Any) -> bool:
    return any(each is inner for each in module.modules())
