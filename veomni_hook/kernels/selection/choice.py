"""Which backend the user wants for each op: the grammar of ``VEOMNI_KERNELS`` and ``kernels`` in settings.

``auto`` | ``eager`` | a backend's name, optionally followed or replaced by ``op=name`` pairs, separated by
commas: ``triton``, ``rms_norm=torch,rotary=eager``, ``triton,rotary=eager``. Other ops get ``auto``.
A backend's name for all ops is a preset. It applies to the ops that the backend has kernels for
(`Registry.preset`); the others keep the upstream code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.declaration import EAGER, RESERVED
from veomni_hook.kernels.selection.registry import registry

__all__ = ["AUTO", "Choice", "call_text", "choice_of", "parse_choice"]

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """The user's choice for every op.

    Attributes:
        preset: the name for ops that ``ops`` does not contain; None leaves them unspecified.
        ops: the name for single ops.
        listed: the ops that ``preset`` applies to; None: all.
        invariant: only kernels whose rows have the same bits in any batch may run.
    """

    preset: str | None = None
    ops: Mapping[str, str] = field(default_factory=dict)
    listed: tuple[str, ...] | None = None
    invariant: bool = False

    def named(self, op: str) -> str | None:
        """Return ``auto``, ``eager``, the name of a backend, or None if ``op`` is unspecified."""
        if op in self.ops or self.preset is None:
            return self.ops.get(op)
        return self.preset if self.listed is None or op in self.listed else EAGER

    def backend(self, op: str) -> str:
        """Return the same as `named`, but ``auto`` if ``op`` is unspecified."""
        return self.named(op) or AUTO

    def why(self, op: str) -> str:
        """Return the reason for what `backend` returns for ``op``."""
        if op in self.ops:
            return f"{op}={self.ops[op]} is chosen"
        if self.preset is None or self.named(op) == self.preset:
            return f"{self.preset or AUTO} is chosen"
        return f"{self.preset} is chosen and has no kernels for {op}"

    def over(self, base: Choice) -> Choice:
        """Return this choice, with ``base`` as the fallback for what it leaves unspecified."""
        invariant = self.invariant or base.invariant
        if self.preset is not None:
            return replace(self, invariant=invariant)
        return Choice(base.preset, {**base.ops, **self.ops}, base.listed, invariant)

    def __str__(self) -> str:
        pairs = [f"{op}={name}" for op, name in self.ops.items()]
        return ",".join([self.preset, *pairs] if self.preset is not None else pairs) or AUTO


def parse_choice(text: str) -> Choice:
    """Parse a choice. Raises KernelError, listing the valid names, for unknown names and duplicate ops."""
    first, *others = (word.strip() for word in text.split(","))
    preset = None if "=" in first else first
    ops: dict[str, str] = {}
    for word in others if preset is not None else [first, *others]:
        op, equals, backend = (part.strip() for part in word.partition("="))
        if not equals:
            raise KernelError(
                f"{word!r} is not of the form op=backend",
                where=f"kernels={text!r}",
                fix="e.g. rms_norm=torch,rotary=eager, or triton,rotary=eager",
            )
        if op in ops:
            raise KernelError(f"{op!r} is chosen twice", where=f"kernels={text!r}", fix="keep one of the two")
        ops[op] = backend
    return choice_of(preset, ops, f"kernels={text!r}")


def choice_of(preset: str | None, ops: Mapping[str, str], where: str) -> Choice:
    """Return the choice for a preset and single ops; ``where`` is the place that errors report.

    Raises:
        KernelError: a name does not exist; the message lists the valid names.
    """
    for op, backend in ops.items():
        if op not in registry.names():
            names = ", ".join(registry.names())
            raise KernelError(f"there is no op {op!r}", where=where, fix=f"ops: {names}")
        _check(backend, registry.backends(op), where, op)
    if preset is None:
        return Choice(ops=dict(ops))
    if preset in RESERVED:
        return Choice(preset, dict(ops))
    _check(preset, registry.backends(), where, "every op")
    return Choice(preset, dict(ops), registry.preset(preset))


def call_text(function: str, preset: str | None, ops: Mapping[str, str | None]) -> str:
    """Return a call that chooses kernels as the user wrote it, for errors."""
    words = [repr(preset)] if preset is not None else []
    return f"{function}({', '.join([*words, *(f'{op}={backend!r}' for op, backend in ops.items())])})"


def _check(backend: object, valid: list[str], where: str, op: str) -> None:
    if backend not in valid:
        raise KernelError(
            f"there is no backend {backend!r}", where=where, fix=f"for {op}: {', '.join(valid)}"
        )
