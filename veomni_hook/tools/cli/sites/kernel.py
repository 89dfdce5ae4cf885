"""What a slot asks first on a machine, and why: for `explain`, `report` and `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from veomni_hook import accelerator
from veomni_hook.kernels.selection.choice import Choice, parse_choice
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.select import Decision, excluded, select, system_of
from veomni_hook.kernels.selection.system import System
from veomni_hook.settings import resolve

__all__ = ["NONE", "Asked", "asked", "chosen", "detected", "machine"]

NONE = "none"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a slot asks first.

    Attributes:
        backend: the kernel's backend; `eager`: upstream's code; `none`: a call raises.
        reason: why.
        decisions: whether each backend was accepted, and why.
    """

    backend: str
    reason: str
    decisions: tuple[Decision, ...]


def asked(op: str, variant: str, choice: Choice, system: System) -> Asked:
    """Return what a slot of a variant asks first.

    Raises:
        KernelError: there is no such op or variant.
    """
    selected = select(op, variant, choice, system)
    decisions = selected.decisions
    if selected.failure is not None:
        return Asked(NONE, selected.failure, decisions)
    backend = selected.kernel.backend if selected.kernel else EAGER
    reason = next(one.reason for one in decisions if one.backend == backend)
    if backend == EAGER and excluded(op, variant, choice) is None:
        reason = f"{reason}: {decisions[0].backend} {decisions[0].reason}"  # because of the system
    if backend == EAGER and registry.ops()[op].parts:
        reason = f"{reason}; {' and '.join(registry.ops()[op].parts)} ask for kernels separately"
    return Asked(backend, reason, decisions)


def chosen() -> Choice:
    """Return the choice of kernels in the settings; does not import torch.

    Raises:
        KernelError: it names something that does not exist.
    """
    return parse_choice(resolve().settings.kernels)


def machine(system: str | None) -> System:
    """Return the system that the option `--system` names; by default this machine.

    Raises:
        KernelError: there is no such system.
    """
    return detected() if system is None else System.named(system)


@cache
def detected() -> System:
    """Return this machine with its best device; imports torch if torch alone knows that."""
    return system_of(accelerator.best())
