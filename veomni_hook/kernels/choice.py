"""Which backend the user wants for each op: the grammar of ``VEOMNI_KERNELS`` and ``kernels`` in settings.

``auto`` | ``eager`` | a backend's name, and then, or instead, ``op=name`` pairs, all with commas:
``triton``, ``rms_norm=torch,rotary=eager``, ``triton,rotary=eager``. Other ops get ``auto``.
A backend's name for all ops is a preset: it stands for the ops that the backend has kernels for
(`Registry.preset`), the others stay with the upstream code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from veomni_hook.errors import KernelError
from veomni_hook.kernels.registry import EAGER, Registry, registry

__all__ = ["AUTO", "Choice", "choice_of", "parse_choice"]

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """What is wanted for every op.

    Attributes:
        preset: the name for ops that ``ops`` does not name; None says nothing of them.
        ops: the name for single ops.
        listed: the ops that ``preset`` stands for; None: all.
    """

    preset: str | None = None
    ops: Mapping[str, str] = field(default_factory=dict)
    listed: tuple[str, ...] | None = None

    def named(self, op: str) -> str | None:
        """Return ``auto``, ``eager``, the name of a backend, or None where nothing is said of ``op``."""
        if op in self.ops or self.preset is None:
            return self.ops.get(op)
        return self.preset if self.listed is None or op in self.listed else EAGER

    def backend(self, op: str) -> str:
        """Return what `named` does, and ``auto`` where nothing is said."""
        return self.named(op) or AUTO

    def why(self, op: str) -> str:
        """Say what made `backend` of ``op`` what it is."""
        if op in self.ops:
            return f"{op}={self.ops[op]} is chosen"
        if self.preset is None or self.named(op) == self.preset:
            return f"{self.preset or AUTO} is chosen"
        return f"{self.preset} is chosen, which has no kernels for {op}"

    def over(self, base: Choice) -> Choice:
        """Return this choice with that of ``base`` for what nothing is said of here."""
        if self.preset is not None:
            return self
        return Choice(base.preset, {**base.ops, **self.ops}, base.listed)

    def __str__(self) -> str:
        pairs = [f"{op}={name}" for op, name in self.ops.items()]
        return ",".join([self.preset, *pairs] if self.preset is not None else pairs) or AUTO


def parse_choice(text: str, known: Registry = registry) -> Choice:
    """Read a choice. Raises KernelError, listing what is valid, for unknown names and ops chosen twice."""
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
    return choice_of(preset, ops, f"kernels={text!r}", known)


def choice_of(preset: str | None, ops: Mapping[str, str], where: str, known: Registry = registry) -> Choice:
    """Return the choice of a preset and single ops; ``where`` is what an error names as its place.

    Raises:
        KernelError: a name does not exist; the message lists those that do.
    """
    for op, backend in ops.items():
        if op not in known.ops():
            raise KernelError(f"there is no op {op!r}", where=where, fix=f"ops: {', '.join(known.ops())}")
        _check(backend, known.backends(op), where, op)
    if preset is None:
        return Choice(ops=dict(ops))
    _check(preset, known.backends(), where, "every op")
    listed = None if preset in (AUTO, EAGER) else known.preset(preset)
    return Choice(preset, dict(ops), listed)


def _check(backend: object, valid: list[str], where: str, op: str) -> None:
    if backend not in valid:
        raise KernelError(
            f"there is no backend {backend!r}", where=where, fix=f"for {op}: {', '.join(valid)}"
        )
