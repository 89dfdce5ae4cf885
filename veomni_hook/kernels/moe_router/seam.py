"""The one place where every recognised router's choice passes: the slots of this op.

`install` puts a function around all of them, those of modules imported later as well. It gets the call that a
guard is about to make, whether a kernel computes it or upstream's code would, and returns the function that
the guard calls. `veomni_hook.routing` records, replays and counts routes with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from veomni_hook.errors import KernelError
from veomni_hook.kernels.moe_router import given, reference

if TYPE_CHECKING:
    import torch

    from veomni_hook.kernels.slot import Slot

    #: ``(slot, owner, kernel or None, operands asked with) -> kernel or None``
    Around = Callable[[Slot, torch.nn.Module, Callable[..., Any] | None, tuple[Any, ...]], Any]

__all__ = ["at_given", "install", "watch"]

_SLOTS: WeakSet[Slot] = WeakSet()
_installed: list[Around] = []


def watch(slot: Slot) -> None:
    """Note a slot when it is created."""
    _SLOTS.add(slot)
    slot.around = _installed[0] if _installed else None


def install(around: Around | None) -> None:
    """Put ``around`` around the calls of every router; None takes it away."""
    _installed[:] = [] if around is None else [around]
    for slot in list(_SLOTS):
        slot.around = around


def at_given(
    variant: str, run: Callable[..., Any] | None
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return what computes, as ``run`` does (None: as upstream's code does), the weights of given experts.

    It takes the operands of ``variant``, and ``indices=``.

    Raises:
        KernelError: ``run`` does not take ``indices``, as kernels of other packages may not.
    """
    if run is None or run is reference.of(variant):
        return given.of(variant)
    if not _takes_indices(run):
        raise KernelError(
            f"the kernel {getattr(run, '__qualname__', run)!r} cannot compute weights of given experts: "
            "it has no operand indices",
            where=f"moe_router/{variant}",
            fix="give the kernel a last parameter indices=None, or choose another one: "
            "use_kernels(moe_router='torch')",
        )
    return run


@cache
def _takes_indices(run: Callable[..., object]) -> bool:
    return "indices" in inspect.signature(run).parameters
