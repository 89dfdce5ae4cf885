"""The decorator of a module class through which calls reach a guard that is below another decorator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from veomni_hook.kernels.selection.registry import load_attribute, registry

__all__ = ["ModuleClass", "NoKernelError", "Taking", "reach"]

ModuleClass = TypeVar("ModuleClass", bound=type)
Taking = Callable[..., tuple[Any, ...]]


class NoKernelError(BaseException):
    """Carries a guard's negative answer out of the guarded method to `reach`."""

    def __init__(self, slot: Any, owner: Any) -> None:
        super().__init__()
        self.slot = slot
        self.owner = owner


def reach(slot: Any, taking: Taking, decorated: ModuleClass) -> ModuleClass:
    """Return the class ``decorated``, whose calls go first to its wrapped ``forward``: see `Slot.reached`."""
    from torch.nn import Module

    covering = vars(decorated).get("forward")
    guarded = getattr(covering, "__wrapped__", None)
    if covering is None or guarded is None:
        return decorated
    slot._skipped.add_reached(decorated, Module)
    waiting = slot._waiting = slot._waiting or threading.local()

    @wraps(covering)
    def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if slot._is_dynamo() or slot._compiler._is_compiling_flag:
            operands = taking(module, *args, **kwargs)
            run = None if slot._exported() else slot._compiled.kernel(module, operands)
            return covering(module, *args, **kwargs) if run is None else run(*operands)
        if slot._hooks_in_force(False) is None and slot.answers(module).idle is not None:
            return covering(module, *args, **kwargs)
        former_owner, waiting.owner = getattr(waiting, "owner", None), module
        try:
            return guarded(module, *args, **kwargs)
        except NoKernelError as signal:
            if signal.slot is not slot or signal.owner is not module:
                raise
        finally:
            waiting.owner = former_owner
        return covering(module, *args, **kwargs)

    # A statement, so that type checkers see no assignment to a method.
    setattr(decorated, "forward", forward)  # noqa: B010
    if (offers := registry.op(slot.op).offers) is not None:
        load_attribute(offers)(slot, decorated)
    return decorated
