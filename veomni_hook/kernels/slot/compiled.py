"""What a slot answers under ``torch.compile``, in a form that dynamo can trace without a graph break.

Compiled code depends on the module's binding and on the choice for the op; only changes of these recompile.
Calls are not recorded, because this code does not run again. Instead, what dynamo compiles for a module is
recorded during tracing. Other modules that run the same compiled code are not traced again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from veomni_hook.kernels.selection.binding import BINDING
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing, variable
from veomni_hook.kernels.slot.candidates import Answers, Outcome
from veomni_hook.kernels.slot.skipped import Skipped

__all__ = ["Compiled", "device_of"]


def device_of(operands: tuple[object, ...]) -> Any:
    """Return the torch device type for selecting kernels: that of the first operand or its first tensor."""
    first = operands[0]
    device = getattr(first, "device", None)
    if device is None and isinstance(first, (tuple, list)) and first:
        device = getattr(first[0], "device", None)
    return None if device is None else device.type


Binder = Callable[..., tuple[Any, ...]]
_LEFT = Outcome(EAGER, "left to Inductor")
#: Why no kernel was asked. While dynamo traces, it is not known which definition was replaced.
_REPLACED = "a function or method that a kernel would not call was replaced"


class Notes:
    """What dynamo compiled, by choice: per module, and the most recent."""

    def __init__(self) -> None:
        self._owners: dict[str, WeakKeyDictionary[Any, Outcome]] = {}
        self._last: dict[str, Outcome] = {}
        self._complete = True

    def add(self, wanted: str, outcome: Outcome) -> None:
        """Record what is being compiled; call it while dynamo traces `Compiled.kernel`."""
        self._last[wanted] = outcome
        owner = _traced_local("owner")
        if owner is None:
            self._complete = False
        else:
            self._owners.setdefault(wanted, WeakKeyDictionary())[owner] = outcome

    def of(self, owner: Any, wanted: str, *, compiled: bool) -> Outcome | None:
        """Return what dynamo compiled for ``owner`` under the choice ``wanted``, or None if unknown.

        ``compiled``: the module is known to be compiled, so the last note of any module applies to it; this
        also applies where it is unknown which modules were traced.
        """
        outcome = self._owners.get(wanted, {}).get(owner)
        return self._last.get(wanted) if outcome is None and (compiled or not self._complete) else outcome


def _traced_local(name: str) -> Any:
    """Return a local of the `Compiled.kernel` that dynamo is tracing; None if torch hides it.

    As arguments, dynamo would guard on the owner and compile every layer separately, and break the graph at a
    reason that it cannot compute (one with a size that varies).
    """
    return getattr(variable(name), "value", None)


class Compiled:
    """The compiled form of one slot.

    ``answers_to`` returns the slot's answers for a chosen backend. ``binder`` returns the function that maps
    arguments to operands. ``skipped`` checks the definitions whose calls the kernels skip. ``asks`` and
    ``settles`` are the functions that `Variant.asks` and `Variant.settles` name, or None. `notes` has what
    was compiled.
    """

    def __init__(
        self,
        op: str,
        answers_to: Callable[[str], Answers],
        binder: Callable[[], Binder],
        skipped: Skipped,
        asks: Callable[..., Any] | None,
        settles: Callable[..., object] | None,
    ) -> None:
        # This module does not import torch, as that of slots does not.
        from veomni_hook.kernels.shared.function_modes import intercepting

        self._intercepting = intercepting
        self._op = op
        self._asks, self._settles = asks, settles
        self._skipped = skipped
        self._binder: Binder
        #: By choice, device type, and whether the caller asks for what only a kernel gives: kernels, each
        #: with its refusals.
        self._kernels: dict[tuple[str, str, bool], Any] = {}
        notes = self.notes = Notes()

        def look_up(wanted: str, device: str, asked: bool) -> bool:
            kernels = () if device is None else answers_to(wanted).traceable(device, asked=asked)
            self._kernels[wanted, device, asked] = kernels
            if not kernels:
                notes.add(wanted, _LEFT)
            return bool(kernels)

        def note(wanted: str, backend: str, refusing: str, left: str) -> bool:
            if backend:
                outcome = Outcome(backend, "compiled in")
            elif refusing:
                reason = _traced_local("reason")
                why = f": {reason}" if isinstance(reason, str) else ""
                outcome = Outcome(EAGER, f"{_LEFT.reason}: {refusing} refused the call{why}")
            else:
                outcome = Outcome(EAGER, f"{_LEFT.reason}: {left}")
            notes.add(wanted, outcome)
            return True

        def prepare() -> bool:
            self._binder = binder()
            return True

        def named(kind: type) -> tuple[tuple[str, str, str], ...]:
            return skipped.named(kind)

        def edited() -> str:
            return "" if skipped.text is None else skipped.text.edited_traced() or ""

        # Results must be constants: functions cannot be, because guards need their source.
        self._look_up = answered_while_tracing(look_up)
        self._note = answered_while_tracing(note)
        self._prepare = answered_while_tracing(prepare)
        self._named = answered_while_tracing(named)
        #: Why the code that asks is not the patched text; empty if it is.
        self.edited = answered_while_tracing(edited)

    def kernel(self, owner: object, operands: tuple[object, ...]) -> Callable[..., Any] | None:
        """Return the kernel that computes this call, or None: run the upstream code."""
        wanted, device, asks = self._wanted(owner), device_of(operands), self._asks
        if wanted == EAGER:
            self.left(owner, "eager is chosen", operands)
            return None
        asked = asks is not None and bool(asks(owner, *operands))
        if not self._look_up(wanted, device, asked):
            self.left(owner, f"{wanted} has no kernel that torch.compile can trace on {device}", operands)
            return None
        why = self.edited() or self._intercepting()
        if not why and self._skipped.changed_traced(self._named(type(owner)), owner, operands):
            why = _REPLACED
        if why:  # a kernel would compute past it
            self._note(wanted, "", "", why)
            self.left(owner, why, operands)
            return None
        refusing = ""
        for run, refusals, backend in self._kernels[wanted, device, asked]:
            for refusal in refusals:
                reason = refusal(owner, *operands)  # `note` reads it
                if reason is not None:
                    refusing = backend
                    break
            else:
                self._note(wanted, backend, "", "")
                return run  # type: ignore[no-any-return]
        self._note(wanted, "", refusing, "")
        self.left(owner, f"{refusing} refused the call", operands)
        return None

    def fuses(self, owner: object) -> bool:
        """Return whether the copy of the asking method shall run."""
        wanted = self._wanted(owner)
        if wanted == EAGER:
            self.left(owner, "eager is chosen")
            return False
        if why := self.edited():
            self._note(wanted, "", "", why)
            self.left(owner, why)
            return False
        return True

    def left(self, owner: object, reason: str, operands: tuple[object, ...] = ()) -> None:
        """Leave a call to the upstream code; raises KernelError if that leaves a request unanswered."""
        if self._settles is not None and STATE.active:
            self._settles(owner, reason, *operands)

    def at(self, owner: object, upstream: Callable[..., object]) -> Callable[..., Any]:
        """Return what to call instead of ``upstream``, with the same arguments."""
        wanted = self._wanted(owner)
        if wanted == EAGER or self._skipped.changed_function_traced(upstream):
            return upstream
        if why := self.edited():
            self._note(wanted, "", "", why)
            return upstream
        return partial(self._call, owner, upstream)

    def _call(
        self, owner: object, upstream: Callable[..., object], /, *args: object, **kwargs: object
    ) -> Any:
        self._prepare()
        operands = self._binder(*args, **kwargs)
        run = self.kernel(owner, (*operands, upstream))
        return upstream(*args, **kwargs) if run is None else run(*operands)

    def _wanted(self, owner: object) -> str:
        # `getattr`, because dynamo detects new attributes but not new keys of `__dict__`.
        bound = getattr(owner, BINDING, None)
        wanted = None if bound is None or not STATE.active else bound.get(self._op)
        return STATE.wanted.get(self._op, AUTO) if wanted is None else wanted
