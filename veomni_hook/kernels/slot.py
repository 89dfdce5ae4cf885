"""Slots: what patched code asks for a kernel.

A slot is a global of the patched module and belongs to one op and variant. A guard asks `Slot.kernel`, a call
site of a function `Slot.at`; `Slot.reached` decorates a class whose guard a decorator of upstream covers.

A slot holds nothing of a model: outcomes are kept beside the modules (weakly), so that pickling, copying and
state dicts see no difference. Under ``torch.compile`` and ``torch.export`` it answers None, and the upstream
code is what is compiled. Where no kernel can come into question it answers at the cost of three comparisons.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from veomni_hook.kernels.choice import AUTO
from veomni_hook.kernels.registry import EAGER, load_attribute, registry
from veomni_hook.kernels.select import Selection, excluded, select
from veomni_hook.kernels.state import STATE
from veomni_hook.kernels.system import System

__all__ = ["Outcome", "Slot"]

logger = logging.getLogger("veomni_hook.kernels")


class Outcome(NamedTuple):
    """What the last call of one module got: a backend (``eager``: the upstream code), and why."""

    backend: str
    reason: str


_UPSTREAM = Outcome(EAGER, "no kernel can run here")
_REPLACED = Outcome(EAGER, "the upstream function was replaced by one of another module")

ModuleClass = TypeVar("ModuleClass", bound=type)


class _NoKernelError(BaseException):
    """Brings the answer of a guard to `Slot.reached`, through the method that the guard stands in."""

    def __init__(self, slot: Slot, owner: Any) -> None:
        super().__init__()
        self.slot = slot
        self.owner = owner


class _Candidate(NamedTuple):
    run: Callable[..., Any]
    refusals: tuple[Callable[..., str | None], ...]
    backend: str
    taken: Outcome


class Slot:
    """The place in a patched module where a kernel of ``op``/``variant`` may take over.

    ``parameters`` are those of the upstream function at whose calls `at` stands, in the form that
    `veomni_hook.kernels.binding` describes; empty: they are the op's operands.
    """

    def __init__(self, op: str, variant: str, module_name: str, parameters: str = "") -> None:
        # Patched modules have imported torch; whoever only reads the names here need not.
        from torch.compiler import is_compiling

        registry.check(op, variant)
        self.op = op
        self.variant = variant
        self.module_name = module_name
        self.parameters = parameters
        self._is_compiling = is_compiling
        self._epoch = -1
        self._version = -1
        self._idle: Outcome | None = None
        self._bind: Callable[..., tuple[Any, ...]] | None = None
        self._candidates: dict[Any, tuple[_Candidate, ...]] = {}
        # By id with a weak reference: a WeakKeyDictionary would cost 1.5 us at every call.
        self._outcomes: dict[int, tuple[ref[Any], list[Outcome]]] = {}
        self._refusals: dict[tuple[str, str], Outcome] = {}
        self._said: set[tuple[int, str, str]] = set()
        # Per thread, the module whose call came through `reached` and whose guard has not been asked yet.
        self._waiting: threading.local | None = None

    def __repr__(self) -> str:
        parameters = f", parameters={self.parameters!r}" if self.parameters else ""
        return f"Slot({self.op!r}, {self.variant!r}, {self.module_name!r}{parameters})"

    def __reduce__(self) -> tuple[object, ...]:
        # Functions that close over a slot are pickled by value in some tools; a slot is rebuilt, not copied.
        return (Slot, (self.op, self.variant, self.module_name, self.parameters))

    def kernel(self, owner: Any, *operands: Any) -> Callable[..., Any] | None:
        """Return the function that computes this call, or None: run the upstream code.

        ``owner`` is the module whose ``forward`` asks; ``operands`` are what kernels decide by (the first
        one's device decides between them; of a list of tensors the first tensor's). Raises KernelError if a
        backend was chosen by name that cannot run on this machine.
        """
        if self._is_compiling():
            return None
        if STATE.epoch != self._epoch or registry.version != self._version:
            self._refresh()
        run = None if self._idle is not None else self._ask(owner, operands)
        if self._waiting is not None and getattr(self._waiting, "owner", None) is owner:
            self._waiting.owner = None
            if run is None:
                raise _NoKernelError(self, owner)
        return run

    def at(self, owner: Any, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call in the place of ``upstream``, with the very same arguments.

        ``upstream`` itself where no kernel comes into question, and where it is a function of another module:
        someone has put it in the place of the one that was recognised. Else a function that asks kernels
        with the op's operands and, last, ``upstream``; the kernel that takes the call is called with the
        operands. It calls ``upstream`` where all refuse, and where the arguments do not fit its parameters.
        """
        if self._is_compiling():
            return upstream
        if STATE.epoch != self._epoch or registry.version != self._version:
            self._refresh()
        if self._idle is not None:
            return upstream
        if type(upstream) is FunctionType and upstream.__module__ != self.module_name:
            self._note(owner, _REPLACED)
            return upstream
        return partial(self._call, owner, upstream)

    def reached(self, decorated: ModuleClass) -> ModuleClass:
        """Let calls of a module class reach the guard in its ``forward``, which another decorator covers.

        For use above a class decorator that wraps ``forward`` (and says so in ``__wrapped__``). A call goes
        to the wrapped ``forward``, whose first statement is the guard. If that finds no kernel, nothing has
        run yet, and the call goes to the wrapper.
        """
        covering = vars(decorated).get("forward")
        guarded = getattr(covering, "__wrapped__", None)
        if covering is None or guarded is None:
            return decorated
        waiting = self._waiting = self._waiting or threading.local()

        @wraps(covering)
        def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_compiling() or self.idle is not None:
                return covering(module, *args, **kwargs)
            held, waiting.owner = getattr(waiting, "owner", None), module
            try:
                return guarded(module, *args, **kwargs)
            except _NoKernelError as signal:
                if signal.slot is not self or signal.owner is not module:
                    raise
            finally:
                waiting.owner = held
            return covering(module, *args, **kwargs)

        # A statement, so that type checkers see no assignment to a method.
        setattr(decorated, "forward", forward)  # noqa: B010
        return decorated

    @property
    def idle(self) -> Outcome | None:
        """What every call gets because no kernel comes into question on any device; None if one does."""
        if STATE.epoch != self._epoch or registry.version != self._version:
            self._refresh()
        return self._idle

    def outcome(self, owner: Any) -> Outcome | None:
        """Return what the last call of the module ``owner`` got; None if it has not asked yet.

        Calls are not noted while the slot is `idle`; that is what is returned then.
        """
        if (idle := self.idle) is not None:
            return idle
        held = self._outcomes.get(id(owner))
        return held[1][0] if held is not None and held[0]() is owner else None

    def selection(self, device: str) -> Selection:
        """Return what would be asked for tensors of the torch device type ``device``, with every decision."""
        return select(self.op, self.variant, STATE.choice, System.detect(device))

    def _refresh(self) -> None:
        """Take over the settings in force."""
        epoch, version = STATE.epoch, registry.version
        self._candidates = {}
        self._refusals = {}
        reason = excluded(self.op, self.variant, STATE.choice)
        if not STATE.active:
            self._idle = Outcome(EAGER, "veomni_hook is deactivated")
        elif reason is not None:
            self._idle = Outcome(EAGER, reason)
            # Who named the op in the choice asked for this one.
            level = (
                logging.WARNING if STATE.choice.ops.get(self.op, EAGER) not in (AUTO, EAGER) else logging.INFO
            )
            self._say(level, "picked", f"{self.op}/{self.variant}: upstream code: {reason}")
        else:
            self._idle = None
        self._epoch, self._version = epoch, version

    def _ask(self, owner: Any, operands: tuple[Any, ...]) -> Callable[..., Any] | None:
        first = operands[0]
        if isinstance(first, tuple | list) and first:
            first = first[0]
        kind = getattr(getattr(first, "device", None), "type", None)
        candidates = self._candidates.get(kind)
        if candidates is None:
            candidates = self._resolve(kind)
        outcome = _UPSTREAM
        for run, refusals, backend, taken in candidates:
            for refusal in refusals:
                reason = refusal(owner, *operands)
                if reason is not None:
                    outcome = self._refusals.get((backend, reason)) or self._refused(backend, reason)
                    break
            else:
                self._note(owner, taken)
                return run
        self._note(owner, outcome)
        return None

    def _call(self, owner: Any, upstream: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._bind is None:
            from veomni_hook.kernels.binding import binder_for

            self._bind = binder_for(self.op, self.variant, self.parameters)
        try:
            operands = self._bind(*args, **kwargs)
        except TypeError:
            return upstream(*args, **kwargs)  # it says itself what does not fit
        run = self._ask(owner, (*operands, upstream))
        return upstream(*args, **kwargs) if run is None else run(*operands)

    def _note(self, owner: Any, outcome: Outcome) -> None:
        key = id(owner)
        held = self._outcomes.get(key)
        if held is None or held[0]() is not owner:
            self._outcomes[key] = (ref(owner, lambda _: self._outcomes.pop(key, None)), [outcome])
        else:
            held[1][0] = outcome

    def _resolve(self, device: Any) -> tuple[_Candidate, ...]:
        if not isinstance(device, str) or device == "meta":
            return ()  # a proxy of a tracer, or nothing to compute
        selection = self.selection(device)
        candidates = []
        for kernel in selection.candidates:
            rules: tuple[str | None, ...] = (kernel.refuses,)
            if selection.choice == AUTO:
                rules = (registry.ops()[self.op].yields, kernel.refuses, kernel.loses)
            candidates.append(
                _Candidate(
                    load_attribute(kernel.load),
                    tuple(load_attribute(rule) for rule in rules if rule is not None),
                    kernel.backend,
                    Outcome(kernel.backend, "chosen" if selection.choice != AUTO else "picked by auto"),
                )
            )
        names = ", ".join(candidate.backend for candidate in candidates) or EAGER
        picked = f"{self.op}/{self.variant} on {device}: {names} ({selection.choice})"
        self._say(logging.INFO, "picked", picked)
        self._candidates[device] = tuple(candidates)
        return self._candidates[device]

    def _refused(self, backend: str, reason: str) -> Outcome:
        # A backend that was asked for by name and does not run is worth a warning; auto promised nothing.
        level = logging.INFO if STATE.choice.backend(self.op) == AUTO else logging.WARNING
        self._say(level, reason, f"{self.op}/{self.variant}: upstream code instead of {backend}: {reason}")
        return self._refusals.setdefault((backend, reason), Outcome(EAGER, reason))

    def _say(self, level: int, topic: str, message: str) -> None:
        if (level, topic, message) not in self._said:
            self._said.add((level, topic, message))
            logger.log(level, "%s: %s", self.module_name, message)
