"""What may see the call of a module, for kernels that compute what it would and do not call it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as module_globals

__all__ = ["call_is_seen"]

_OWN = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = tuple(
    getattr(module_globals, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


def call_is_seen(module: nn.Module) -> str | None:
    """Return what, about a call of ``module``, is more than its class's ``forward``, or None."""
    held = module.__dict__
    for name in _OWN:
        if held[name]:
            return "has hooks"
    own = held.get("forward")
    # The class's own, bound to the module, is what some wrappers leave behind.
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return "has a forward of its own"
    if module._compiled_call_impl is not None:
        return "is compiled by itself"
    for hooks in _GLOBAL:
        if hooks:
            return "is seen by a hook for all modules"
    return None
