"""Which backend the user wants for each op: the grammar of ``VEOMNI_KERNELS`` and ``kernels`` in settings.

``auto`` | ``eager`` | a backend's name, for all ops; or ``op=name`` pairs with commas, where ops that are not
named stay at ``auto``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from veomni_hook.errors import KernelError
from veomni_hook.kernels.registry import Registry, registry

__all__ = ["AUTO", "Choice", "parse_choice"]

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """The wanted backend for every op: ``ops`` where named, ``default`` otherwise."""

    default: str = AUTO
    ops: Mapping[str, str] = field(default_factory=dict)

    def backend(self, op: str) -> str:
        """Return ``auto``, ``eager`` or the name of a backend."""
        return self.ops.get(op, self.default)

    def __str__(self) -> str:
        return ",".join(f"{op}={name}" for op, name in self.ops.items()) or self.default


def parse_choice(text: str, known: Registry = registry) -> Choice:
    """Read a choice. Raises KernelError, listing what is valid, for unknown names and ops chosen twice."""
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1 and "=" not in words[0]:
        return Choice(_checked(words[0], known.backends(), text, "every op"))
    ops: dict[str, str] = {}
    for word in words:
        op, equals, backend = (part.strip() for part in word.partition("="))
        if not equals:
            raise KernelError(
                f"{word!r} is not of the form op=backend",
                where=f"kernels={text!r}",
                fix="e.g. rms_norm=torch,rotary=eager",
            )
        if op not in known.ops():
            raise KernelError(
                f"no op is called {op!r}", where=f"kernels={text!r}", fix=f"ops: {', '.join(known.ops())}"
            )
        if op in ops:
            raise KernelError(f"{op!r} is chosen twice", where=f"kernels={text!r}", fix="keep one of the two")
        ops[op] = _checked(backend, known.backends(op), text, op)
    return Choice(ops=ops)


def _checked(backend: str, valid: list[str], text: str, op: str) -> str:
    if backend not in valid:
        raise KernelError(
            f"no backend is called {backend!r}",
            where=f"kernels={text!r}",
            fix=f"for {op}: {', '.join(valid)}",
        )
    return backend
