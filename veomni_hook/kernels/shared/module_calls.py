"""What could observe or change the call of a module that a kernel computes without calling it."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from veomni_hook.kernels.shared.origin import written_in
from veomni_hook.kernels.shared.passed_on import passes_on
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing

__all__ = [
    "call_is_overridden",
    "call_is_seen",
    "has_code",
    "is_as_written",
    "is_linear",
    "parameter",
    "place_of",
]

_GLOBAL_FORWARD, _GLOBAL_FORWARD_PRE, _GLOBAL_BACKWARD, _GLOBAL_BACKWARD_PRE = (
    getattr(module_globals, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)
# Not `nn.Module.__call__`, which tracers and profilers replace.
_CALL = vars(nn.Module)["_wrapped_call_impl"]
#: What torch's ``__call__`` asks: an instance or a class may have its own.
_CALL_IMPL = vars(nn.Module)["_call_impl"]

#: The code of unchanged forwards, stored as attributes: see `skipped.Skipped.named`.
_FORWARDS = SimpleNamespace()
_PLACES: dict[type, str] = {}


def call_is_seen(module: nn.Module, x: torch.Tensor | None = None) -> str | None:
    """Return what a call of ``module`` does besides its class's ``forward``, or None.

    With ``x``, a forward on the instance counts only if it does not just `pass it on <passes_on>`.
    """
    attributes = module.__dict__
    # Unrolled, because every guard calls this: loops over these and the global ones took a fifth longer.
    if (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
    ):
        return "has hooks"
    # Some wrappers leave the class's own forward, bound to the module, in the instance.
    if (
        "forward" in attributes
        and getattr(attributes["forward"], "__func__", None) is not type(module).forward
    ):
        if x is None or not passes_on(module, x):
            return "has its own forward"
    if "_compiled_call_impl" in attributes and attributes["_compiled_call_impl"] is not None:
        return "is compiled separately"
    if _GLOBAL_FORWARD or _GLOBAL_FORWARD_PRE or _GLOBAL_BACKWARD or _GLOBAL_BACKWARD_PRE:
        return "is subject to a global hook"
    kind = type(module)
    if kind.__call__ is not _CALL or kind._call_impl is not _CALL_IMPL or "_call_impl" in attributes:
        return call_is_overridden(module)
    return None


def parameter(module: nn.Module, name: str) -> Any:
    """Return ``module.name``; parameters bypass `torch.nn.Module.__getattr__`, which takes over 1 us."""
    registered = module._parameters.get(name)
    return getattr(module, name) if registered is None else registered


def call_is_overridden(module: nn.Module) -> str | None:
    """Return why a call of ``module`` does not use torch's ``__call__``, or None."""
    kind = type(module)
    if kind.__call__ is not _CALL:
        return f"has a __call__ that is not torch's ({kind.__name__})"
    if kind._call_impl is not _CALL_IMPL or "_call_impl" in module.__dict__:
        return f"has a _call_impl that is not torch's ({kind.__name__})"
    return None


def is_as_written(kind: type[nn.Module]) -> bool:
    """Return whether a class's ``forward`` is the one that its module's text defines for it."""
    place = place_of(kind)
    return place != "" and has_code(kind, place)


def has_code(kind: type[nn.Module], place: str) -> bool:
    """Return whether the forward of a class has the code that `place_of` found."""
    return kind.forward.__code__ is getattr(_FORWARDS, place)


def is_linear(kind: type) -> bool:
    """Return whether instances of a class compute what the original ``nn.Linear`` does."""
    return issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward and is_as_written(nn.Linear)


@answered_while_tracing
def place_of(kind: type[nn.Module]) -> str:
    """Return where the code of a class's forward is stored; empty unless it is the one in its text."""
    places = _PLACES.get(kind)
    if places is not None:
        return places
    forward, written = kind.forward, (kind.__module__, f"{kind.__qualname__}.forward")
    if type(forward) is not FunctionType or written_in(forward) != written:
        return ""
    place = f"{kind.__name__}_{len(_PLACES)}"
    setattr(_FORWARDS, place, forward.__code__)
    return _PLACES.setdefault(kind, place)
