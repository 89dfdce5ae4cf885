"""The choice of kernels: a pure function of op, variant, the user's choice and the system.

Every kernel that was looked at leaves a `Decision` with a reason. What depends on a call (dtype, shapes,
hooks) is not decided here: the slot asks each candidate in turn, at the call.
"""

from __future__ import annotations

from dataclasses import dataclass

from veomni_hook.errors import KernelError
from veomni_hook.kernels.choice import AUTO, Choice
from veomni_hook.kernels.registry import EAGER, Kernel, Registry, registry
from veomni_hook.kernels.system import System

__all__ = ["Decision", "Selection", "excluded", "select"]


@dataclass(frozen=True)
class Decision:
    """What became of one backend, and why."""

    backend: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class Selection:
    """``candidates`` in the order in which a slot asks them (none: the upstream code runs)."""

    op: str
    variant: str
    choice: str
    candidates: tuple[Kernel, ...]
    decisions: tuple[Decision, ...]

    @property
    def kernel(self) -> Kernel | None:
        """The first candidate, or None for the upstream code."""
        return self.candidates[0] if self.candidates else None


def select(op: str, variant: str, choice: Choice, system: System, known: Registry = registry) -> Selection:
    """Choose the kernels for ``op``/``variant`` on ``system``.

    A backend chosen by name that has no kernel for this variant leaves the upstream code: a choice names a
    backend for all variants of an op, and a model may use several. Raises KernelError for unknown names, and
    when a backend that was chosen by name has a kernel that cannot run there: the message lists what can and
    why the rest cannot.
    """
    known.check(op, variant)
    wanted = choice.backend(op)
    kernels = known.kernels(op, variant)
    decisions = [_decide(kernel, wanted, system) for kernel in kernels]
    accepted = tuple(kernel for kernel, decision in zip(kernels, decisions, strict=True) if decision.accepted)
    if not accepted and any(kernel.backend == wanted for kernel in kernels):
        raise _cannot_run(op, variant, wanted, kernels, system)
    decisions.append(Decision(EAGER, *_upstream(wanted, accepted, kernels)))
    return Selection(op, variant, wanted, accepted, tuple(decisions))


def _upstream(wanted: str, accepted: tuple[Kernel, ...], kernels: list[Kernel]) -> tuple[bool, str]:
    if accepted:
        return wanted == AUTO, "the code to fall back to"
    return True, _excluded(wanted, kernels) or "no kernel can run here"


def excluded(op: str, variant: str, choice: Choice, known: Registry = registry) -> str | None:
    """Return why no kernel of ``op``/``variant`` comes into question on any system, or None if one does."""
    return _excluded(choice.backend(op), known.kernels(op, variant))


def _excluded(wanted: str, kernels: list[Kernel]) -> str | None:
    if any(_passed_over(kernel, wanted) is None for kernel in kernels):
        return None
    if wanted == EAGER:
        return "eager is chosen"
    if wanted == AUTO:
        return "it has no kernel besides the reference"
    return f"{wanted} has no kernel for this variant"


def _passed_over(kernel: Kernel, wanted: str) -> str | None:
    """Why a choice passes a kernel over, whatever the system."""
    if wanted not in (AUTO, kernel.backend):
        return f"{wanted} was chosen"
    return "runs only if chosen by name" if wanted == AUTO and not kernel.automatic else None


def _decide(kernel: Kernel, wanted: str, system: System) -> Decision:
    reason = _passed_over(kernel, wanted)
    if reason is not None:
        return Decision(kernel.backend, accepted=False, reason=reason)
    unmet = kernel.requires.unmet(system)
    if unmet is not None:
        return Decision(kernel.backend, accepted=False, reason=unmet)
    return Decision(kernel.backend, accepted=True, reason="chosen" if wanted != AUTO else "can run here")


def _cannot_run(op: str, variant: str, wanted: str, kernels: list[Kernel], system: System) -> KernelError:
    unmet = {kernel.backend: kernel.requires.unmet(system) for kernel in kernels}
    able = [EAGER, *(backend for backend, reason in unmet.items() if reason is None)]
    unable = [f"{backend} ({reason})" for backend, reason in unmet.items() if reason is not None]
    fix = f"choose from: {', '.join(able)}" + (f"; these cannot run: {', '.join(unable)}" if unable else "")
    return KernelError(f"{op}/{variant} cannot use {wanted!r}: {unmet[wanted]}", where=str(system), fix=fix)
