"""What a slot answers for one choice: one backend, or ``auto``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import AUTO, Choice
from veomni_hook.kernels.selection.declaration import EAGER, Kernel
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.selection.select import Selection, excluded, select, system_of
from veomni_hook.plugins import described, give_up, remedy

__all__ = ["REPLACED", "Answers", "Candidate", "Outcome", "Site"]

#: Used as a backend: neither a kernel nor upstream's code runs, but code of another library or the user.
REPLACED = "replaced"

logger = logging.getLogger("veomni_hook.kernels")


class Outcome(NamedTuple):
    """What computed a module's last call: a backend (``eager``: upstream's code) or `REPLACED`, and why."""

    backend: str
    reason: str


class Candidate(NamedTuple):
    """A kernel to ask: ``decision`` is it and why it runs, unless one of ``refusals`` returns a reason."""

    refusals: tuple[Callable[..., str | None], ...]
    backend: str
    decision: tuple[Callable[..., Any], Outcome]


class Site(NamedTuple):
    """The place of a slot, and what it has already logged."""

    op: str
    variant: str
    module_name: str
    said: set[tuple[int, str]]

    def say(self, level: int, message: str) -> None:
        """Log a message about this site, once."""
        if (level, message) not in self.said:
            self.said.add((level, message))
            logger.log(level, "%s: %s/%s%s", self.module_name, self.op, self.variant, message)


class Answers:
    """The kernels of a site under one choice, by the torch device type of the operands.

    Attributes:
        wanted: ``auto``, ``eager`` or a backend.
        idle: the outcome of every call if no kernel is possible on any device; else None.
        as_fast: the reasons of refusals that left a call to upstream's code because it was measured as fast.
        on: what `candidates` returned, by device; whoever asks at every call fills it.
    """

    def __init__(self, site: Site, choice: Choice, idle: Outcome | None = None) -> None:
        self.wanted = choice.backend(site.op)
        self._site = site
        self._choice = choice
        self._candidates: dict[Any, tuple[Candidate, ...]] = {}
        self.on: dict[Any, tuple[Candidate, ...]] = {}
        self._refusals: dict[tuple[str, str], Outcome] = {}
        self._losing: set[Callable[..., str | None]] = set()
        self.as_fast: set[str] = set()
        reason = None if idle is not None else excluded(site.op, site.variant, choice)
        self.idle = idle if reason is None else Outcome(EAGER, reason)
        if reason is not None:
            site.say(logging.INFO, f": upstream's code runs: {reason}")
            self._tell(None)

    def selection(self, device: str) -> Selection:
        """Return the selection for tensors of the torch device type ``device``, with every decision."""
        return select(self._site.op, self._site.variant, self._choice, system_of(device))

    def candidates(self, device: object) -> tuple[Candidate, ...]:
        """Return the kernels to ask, in order.

        Raises:
            KernelError: a backend chosen by name has no kernel for the variant, or cannot run there.
        """
        if (known := self._candidates.get(device)) is not None:
            return known
        if not isinstance(device, str) or device == "meta":
            return ()  # a tracer's proxy, or nothing to compute
        taken = "chosen" if self.wanted != AUTO else "picked by auto"
        selection = self.selection(device).checked(self._named())
        resolved = tuple(
            Candidate(rules, kernel.backend, (run, Outcome(kernel.backend, taken)))
            for kernel, run, rules in self._loaded(selection.candidates)
        )
        self._tell(device)
        names = ", ".join(candidate.backend for candidate in resolved) or EAGER
        self._site.say(logging.INFO, f" on {device}: {names} ({self.wanted})")
        self._candidates[device] = resolved
        return resolved

    def refused(self, backend: str, reason: str, rule: Callable[..., str | None] | None = None) -> Outcome:
        """Return the outcome of a call that ``backend`` refused; ``rule`` is the one that did, if one did."""
        outcome = self._refusals.get((backend, reason))
        if outcome is None:
            # A backend chosen by name that does not run deserves a warning; auto promised nothing.
            level = logging.INFO if self.wanted == AUTO else logging.WARNING
            self._site.say(level, f": upstream's code runs instead of {backend}: {reason}")
            outcome = self._refusals[backend, reason] = Outcome(EAGER, reason)
            if rule in self._losing:
                self.as_fast.add(reason)
        return outcome

    def _tell(self, device: str | None, *, compiled: bool = False) -> None:
        if STATE.asked is not None:
            STATE.asked(self._site.module_name, device, compiled)

    def traceable(self, device: str, *, asked: bool) -> tuple[tuple[Any, tuple[Any, ...], str], ...]:
        """Return the kernels to ask under ``torch.compile``, each with its refusals and its backend.

        ``asked``: see `Selection.compiled_in`.
        """
        if self.idle is not None or device == "meta":
            return ()
        selection = self.selection(device).checked(self._named())
        self._tell(device, compiled=True)
        kept = selection.compiled_in(asked=asked)
        if not kept and self.wanted != AUTO:
            self._site.say(
                logging.WARNING,
                f": upstream's code runs under torch.compile, because {self.wanted} is not traceable",
            )
        return tuple((run, rules, kernel.backend) for kernel, run, rules in self._loaded(kept))

    def _loaded(
        self, kernels: Iterable[Kernel]
    ) -> Iterator[tuple[Kernel, Callable[..., Any], tuple[Callable[..., Any], ...]]]:
        """Return the kernels with their code and rules; under ``auto``, failing plugins are skipped."""
        for kernel in kernels:
            try:
                yield kernel, load_attribute(kernel.load), self._rules(kernel)
            except KernelError as error:
                point = registry.announced_by(kernel)
                if point is None:
                    raise
                failure = KernelError(error.what, where=described(point), fix=remedy(point))
                if self.wanted != AUTO:  # chosen by name: it must run or raise
                    raise failure from error
                give_up(point, failure)

    def _rules(self, kernel: Kernel) -> tuple[Callable[..., Any], ...]:
        yields = registry.op(self._site.op).yields
        before = () if yields is None or self.wanted != AUTO else (yields,)
        rules = tuple(map(load_attribute, (*before, *registry.rules(kernel))))
        # Which code is faster depends on the batch.
        if self.wanted != AUTO or kernel.loses is None or self._choice.invariant:
            return rules
        loses = load_attribute(kernel.loses)
        self._losing.add(loses)
        return (*rules, loses)

    def _named(self) -> str:
        return f"{self._site.module_name}, kernels={self._choice}"
