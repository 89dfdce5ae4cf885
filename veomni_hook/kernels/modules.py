"""What may see the call of a module, for kernels that compute what it would and do not call it."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.modules import module as module_globals

__all__ = [
    "call_is_overridden",
    "call_is_seen",
    "has_code",
    "is_as_written",
    "is_linear",
    "parameter",
    "place_of",
    "written_in",
]

_GLOBAL_FORWARD, _GLOBAL_FORWARD_PRE, _GLOBAL_BACKWARD, _GLOBAL_BACKWARD_PRE = (
    getattr(module_globals, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)
# Not `nn.Module.__call__`, which tracers and profilers replace.
_CALL = vars(nn.Module)["_wrapped_call_impl"]

#: The code of forwards that are as their module's text has them, as attributes: see `skipped.Skipped.named`.
_FORWARDS = SimpleNamespace()
_PLACES: dict[type, str] = {}


def call_is_seen(module: nn.Module) -> str | None:
    """Return what, about a call of ``module``, is more than its class's ``forward``, or None."""
    held = module.__dict__
    # Written out, since every guard asks: loops over these and the global ones took a fifth longer.
    if (
        held["_forward_hooks"]
        or held["_forward_pre_hooks"]
        or held["_backward_hooks"]
        or held["_backward_pre_hooks"]
    ):
        return "has hooks"
    own = held.get("forward")
    # The class's own, bound to the module, is what some wrappers leave behind.
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return "has a forward of its own"
    if module._compiled_call_impl is not None:
        return "is compiled by itself"
    if _GLOBAL_FORWARD or _GLOBAL_FORWARD_PRE or _GLOBAL_BACKWARD or _GLOBAL_BACKWARD_PRE:
        return "is seen by a hook for all modules"
    if type(module).__call__ is not _CALL:
        return call_is_overridden(module)
    return None


def parameter(module: nn.Module, name: str) -> Any:
    """Return ``module.name``; of a parameter without `torch.nn.Module.__getattr__`, which takes over 1 us."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def call_is_overridden(module: nn.Module) -> str | None:
    """Return why a call of ``module`` is not torch's own, of hooks and ``forward``, or None."""
    if type(module).__call__ is not _CALL:
        return f"has a __call__ that is not torch's ({type(module).__name__})"
    return None


def written_in(function: Any) -> tuple[str, str]:
    """Return the module in which a function was written, and its name there.

    Its code tells, and its globals: ``__module__`` and ``__qualname__`` are what a decorator made of them. Of
    what is no function its class tells.
    """
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return str(type(function).__module__), type(function).__qualname__
    return str(function.__globals__.get("__name__", "")), str(code.co_qualname)


def is_as_written(kind: type[nn.Module]) -> bool:
    """Whether ``forward`` of a class is the one that the text of the class's module defines for it."""
    place = place_of(kind)
    return place != "" and has_code(kind, place)


def has_code(kind: type[nn.Module], place: str) -> bool:
    """Whether the forward of a class has the code that `place_of` has found."""
    return kind.forward.__code__ is getattr(_FORWARDS, place)


def is_linear(kind: type) -> bool:
    """Whether instances of a class compute what ``nn.Linear`` does, as it was written."""
    return issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward and is_as_written(nn.Linear)


def place_of(kind: type[nn.Module]) -> str:
    """Return where the code of a class's forward is held; empty unless it is the one in the class's text."""
    found = _PLACES.get(kind)
    if found is not None:
        return found
    forward, written = kind.forward, (kind.__module__, f"{kind.__qualname__}.forward")
    if type(forward) is not FunctionType or written_in(forward) != written:
        return ""
    place = f"{kind.__name__}_{len(_PLACES)}"
    setattr(_FORWARDS, place, forward.__code__)
    return _PLACES.setdefault(kind, place)


# What torch.compiler.assume_constant_result does, which imports dynamo.
setattr(place_of, "_dynamo_marked_constant", True)  # noqa: B010 - mypy knows no such attribute
