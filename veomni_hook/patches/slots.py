"""Kernel slots as a config declares them: the globals of a patched module that its code asks for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["SlotHandle", "SlotSpec", "formula_slot", "slot_name"]


@dataclass(frozen=True)
class SlotSpec:
    """A kernel slot that the patched module gets as a global: ``name = Slot(op, variant, module)``.

    ``parameters`` are those of the upstream function whose calls the slot replaces, as source text. ``skips``
    lists definitions of the module that kernels compute without calling them. Each entry is a pair: the place
    that asks (a method, or a function whose calls ask) and the names.
    """

    name: str
    op: str
    variant: str
    parameters: str = ""
    skips: tuple[tuple[str, tuple[str, ...]], ...] = ()


class SlotHandle:
    """Stands for a slot in a config, so that guard functions written there resolve their names.

    The patched module has the real slot under the same name; this placeholder cannot be called.
    """

    def __init__(self, spec: SlotSpec) -> None:
        self.spec = spec

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"slot {self.spec.name!r} exists in patched modules only; it has no {name!r} here"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Not callable: guards run in the patched module, not where they are written."""
        raise TypeError(f"slot {self.spec.name!r} exists in patched modules only and cannot be called here")


def slot_name(op: str, variant: str) -> str:
    """The global of a patched module that holds the slot of ``op``/``variant``."""
    return f"veomni_{op}_{variant}"


def formula_slot(op: str, variant: str, parameters: str = "") -> SlotSpec:
    """The slot that routes of ``op``/``variant`` ask; ``parameters`` are those of `SlotSpec`."""
    return SlotSpec(slot_name(op, variant), op, variant, parameters)
