"""Slots: what a guard in patched code asks for a kernel.

A slot is a global of the patched module and belongs to one op and variant. It holds nothing of a model:
outcomes are kept beside the modules (weakly), so that pickling, copying and state dicts see no difference.
Under ``torch.compile`` and ``torch.export`` it answers None, and the upstream code is what is compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from veomni_hook.kernels.choice import AUTO
from veomni_hook.kernels.registry import EAGER, load_attribute, registry
from veomni_hook.kernels.select import Selection, select
from veomni_hook.kernels.state import STATE
from veomni_hook.kernels.system import System

__all__ = ["Outcome", "Slot"]

logger = logging.getLogger("veomni_hook.kernels")


class Outcome(NamedTuple):
    """What the last call of one module got: a backend (``eager``: the upstream code), and why."""

    backend: str
    reason: str


_UPSTREAM = Outcome(EAGER, "eager is chosen, or nothing can run here")


class _Candidate(NamedTuple):
    run: Callable[..., Any]
    refusals: tuple[Callable[..., str | None], ...]
    backend: str
    taken: Outcome


class Slot:
    """The place in a patched module where a kernel of ``op``/``variant`` may take over."""

    def __init__(self, op: str, variant: str, module_name: str) -> None:
        # Patched modules have imported torch; whoever only reads the names here need not.
        from torch.compiler import is_compiling

        registry.check(op, variant)
        self.op = op
        self.variant = variant
        self.module_name = module_name
        self._is_compiling = is_compiling
        self._epoch = (-1, -1)
        self._candidates: dict[Any, tuple[_Candidate, ...]] = {}
        # By id with a weak reference: a WeakKeyDictionary would cost 1.5 us at every call.
        self._outcomes: dict[int, tuple[ref[Any], list[Outcome]]] = {}
        self._said: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        return f"Slot({self.op!r}, {self.variant!r}, {self.module_name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Functions that close over a slot are pickled by value in some tools; a slot is rebuilt, not copied.
        return (Slot, (self.op, self.variant, self.module_name))

    def kernel(self, owner: Any, *operands: Any) -> Callable[..., Any] | None:
        """Return the function that computes this call, or None: run the upstream code.

        ``owner`` is the module whose ``forward`` asks; ``operands`` are what the kernel would be called with
        (the first one's device decides between kernels). Raises KernelError if a backend was chosen by name
        that cannot run on this machine.
        """
        if self._is_compiling():
            return None
        if (STATE.epoch, registry.version) != self._epoch:
            self._candidates = {}
            self._epoch = (STATE.epoch, registry.version)
        if not STATE.active:
            return None
        kind = getattr(getattr(operands[0], "device", None), "type", None)
        candidates = self._candidates.get(kind)
        if candidates is None:
            candidates = self._resolve(kind)
        outcome = _UPSTREAM
        for run, refusals, backend, taken in candidates:
            for refusal in refusals:
                reason = refusal(owner, *operands)
                if reason is not None:
                    outcome = self._refused(backend, reason)
                    break
            else:
                self._note(owner, taken)
                return run
        self._note(owner, outcome)
        return None

    def outcome(self, owner: Any) -> Outcome | None:
        """Return what the last call of the module ``owner`` got; None if it has not asked yet."""
        held = self._outcomes.get(id(owner))
        return held[1][0] if held is not None and held[0]() is owner else None

    def selection(self, device: str) -> Selection:
        """Return what would be asked for tensors of the torch device type ``device``, with every decision."""
        return select(self.op, self.variant, STATE.choice, System.detect(device))

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
            rules = (kernel.refuses, kernel.loses if selection.choice == AUTO else None)
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
        return Outcome(EAGER, reason)

    def _say(self, level: int, topic: str, message: str) -> None:
        if (topic, message) not in self._said:
            self._said.add((topic, message))
            logger.log(level, "%s: %s", self.module_name, message)
