"""The selection of kernels: a pure function of op, variant, the user's choice and the system.

Every kernel considered gets a `Decision` with a reason. What depends on the call (dtype, shapes, hooks) is
not decided here: at the call, the slot asks each candidate in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import AUTO, Choice
from veomni_hook.kernels.selection.declaration import EAGER, REFERENCE, Kernel
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System

__all__ = ["UNSUPPLIED", "Decision", "Selection", "excluded", "select", "system_of"]

#: The reason why a kernel does not run in the batch-invariant mode.
NOT_INVARIANT = "its rows are not known to be batch-invariant (deterministic=batch_invariant)"
#: The reason why the upstream code runs on every system, for variants that only have a reference.
UNSUPPLIED = "no kernel exists for this formula on any machine; upstream's code runs"


@dataclass(frozen=True)
class Decision:
    """Whether one backend was accepted, and why."""

    backend: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class Selection:
    """The kernels selected for a variant of an op.

    Attributes:
        wanted: ``auto``, ``eager`` or the backend that was chosen by name.
        candidates: in the order in which a slot asks them; if empty, the upstream code runs.
        decisions: one for every kernel, and one for the upstream code.
        failure: set if neither can run: the backend was chosen by name, and none of its kernels can run.
        remedy: how to fix a failure.
        system: the system that this selection is for.
    """

    op: str
    variant: str
    wanted: str
    candidates: tuple[Kernel, ...]
    decisions: tuple[Decision, ...]
    system: System
    failure: str | None = None
    remedy: str = ""

    @property
    def kernel(self) -> Kernel | None:
        """The first candidate, or None for the upstream code."""
        return self.candidates[0] if self.candidates else None

    def compiled_in(self, *, asked: bool = False) -> list[Kernel]:
        """Return the candidates under ``torch.compile``; if empty, Inductor compiles the upstream code.

        ``asked``: the upstream code cannot give what the caller asks for (`Variant.asks`).
        """
        kept = [kernel for kernel in self.candidates if kernel.traceable]
        if self.wanted == AUTO and not asked:
            kept = [kernel for kernel in kept if kernel.beats_inductor]
        return kept

    def checked(self, site: str = "") -> Selection:
        """Return the selection itself; raise KernelError, naming ``site``, if it is a failure."""
        if self.failure is not None:
            where = f"{site}, on {self.system}" if site else str(self.system)
            raise KernelError(self.failure, where=where, fix=self.remedy)
        return self


def system_of(device: str) -> System:
    """Return this machine as a `System` for tensors of the torch device type ``device``."""
    return System.detect(device, registry.distributions())


def select(op: str, variant: str, choice: Choice, system: System) -> Selection:
    """Select the kernels for ``op``/``variant`` on ``system``. Raises KernelError for unknown names."""
    registry.check(op, variant)
    wanted = choice.backend(op)
    kernels = registry.kernels(op, variant)
    decisions = [_decide(kernel, wanted, system, invariant=choice.invariant) for kernel in kernels]
    accepted = tuple(kernel for kernel, decision in zip(kernels, decisions, strict=True) if decision.accepted)
    failure = remedy = None
    if not accepted and wanted not in (AUTO, EAGER):
        failure, remedy = _failure(op, variant, wanted, kernels, system, invariant=choice.invariant)
    # The last decision is that about the upstream code.
    if failure is not None:
        decisions.append(Decision(EAGER, accepted=False, reason=f"a call raises an error: {failure}"))
    elif accepted:
        decisions.append(Decision(EAGER, accepted=wanted == AUTO, reason="the fallback"))
    else:
        reason = excluded(op, variant, choice) or "no kernel can run here"
        decisions.append(Decision(EAGER, accepted=True, reason=reason))
    return Selection(op, variant, wanted, accepted, tuple(decisions), system, failure, remedy or "")


def excluded(op: str, variant: str, choice: Choice) -> str | None:
    """Return why the upstream code of ``op``/``variant`` runs on any system, or None if a kernel may."""
    wanted = choice.backend(op)
    if wanted == EAGER:
        return choice.why(op)
    kernels = registry.kernels(op, variant)
    if wanted != AUTO or any(kernel.automatic for kernel in kernels):
        return None
    if not registry.supplied(op, variant):
        return UNSUPPLIED
    named = (kernel.backend for kernel in kernels if kernel.backend != REFERENCE)
    return f"auto uses none of its kernels; choose one by name: {', '.join(named)}"


def _decide(kernel: Kernel, wanted: str, system: System, *, invariant: bool) -> Decision:
    if wanted not in (AUTO, kernel.backend):
        return Decision(kernel.backend, accepted=False, reason=f"{wanted} was chosen")
    if wanted == AUTO and not kernel.automatic:
        return Decision(kernel.backend, accepted=False, reason="runs only if chosen by name")
    unmet = _unmet(kernel, system, invariant=invariant)
    if unmet is not None:
        return Decision(kernel.backend, accepted=False, reason=unmet)
    return Decision(kernel.backend, accepted=True, reason="chosen" if wanted != AUTO else "can run here")


def _unmet(kernel: Kernel, system: System, *, invariant: bool) -> str | None:
    """Return why ``kernel`` cannot run on ``system``, or in the batch-invariant mode there, or None."""
    if (reason := kernel.requires.unmet(system)) is not None:
        return reason
    return None if not invariant or system.device in kernel.invariant else NOT_INVARIANT


def _failure(
    op: str, variant: str, wanted: str, kernels: list[Kernel], system: System, *, invariant: bool
) -> tuple[str, str]:
    """Return why a backend chosen by name cannot serve a site, and which backends can."""
    unmet = {kernel.backend: _unmet(kernel, system, invariant=invariant) for kernel in kernels}
    able = ["auto", EAGER, *(backend for backend, reason in unmet.items() if reason is None)]
    unable = [f"{backend} ({reason})" for backend, reason in unmet.items() if reason is not None]
    why = f"cannot use {wanted!r}: {unmet[wanted]}" if wanted in unmet else f"has no {wanted!r} kernel"
    remedy = f"choose for {op}, as in {op}=auto, one of: {', '.join(able)}"
    return f"{op}/{variant} {why}", remedy + (f"; these cannot run: {', '.join(unable)}" if unable else "")
