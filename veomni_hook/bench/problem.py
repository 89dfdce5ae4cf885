"""One operation at one size: operands, the sides that compute it, and how much work it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

__all__ = ["Problem", "Side", "liger", "made", "ours"]

Side = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Problem:
    """What is measured.

    Attributes:
        op: its name.
        shape: for people.
        leaves: the operands that get gradients; every side is called with these, in this order.
        sides: what computes it, by name; ``eager`` is the upstream code.
        incoming: gradients of the results, by the name of the part that they are measured as; where it is
            empty, forward and backward are one part, ``step``, from a scalar.
        limit: what bounds it: bytes that move, or floating-point operations.
        work: how many of these each part needs at least.
        spoils: sides whose backward writes into the gradient that it is given.
    """

    op: str
    shape: str
    leaves: Sequence[torch.Tensor]
    sides: Mapping[str, Side]
    limit: Literal["bytes", "flops"]
    work: Mapping[str, int]
    incoming: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    spoils: frozenset[str] = frozenset()

    @property
    def dtype(self) -> str:
        """The dtype of the first operand."""
        return str(self.leaves[0].dtype).removeprefix("torch.")


def made(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Seeded normal values."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def ours(op: str, variant: str, device: str) -> dict[str, Side]:
    """What ``auto`` picks on this machine, as the side ``ours``; nothing where that is the upstream code."""
    from veomni_hook.kernels.choice import Choice
    from veomni_hook.kernels.registry import load_attribute
    from veomni_hook.kernels.select import select, system_of

    kernel = select(op, variant, Choice(), system_of(device)).kernel
    return {} if kernel is None else {"ours": load_attribute(kernel.load)}


def liger(op: str, variant: str, device: str) -> dict[str, Side]:
    """Liger's function through our adapter, as the side ``liger``; nothing where it cannot run."""
    from veomni_hook.kernels.choice import Choice
    from veomni_hook.kernels.registry import load_attribute
    from veomni_hook.kernels.select import select, system_of

    kernel = select(op, variant, Choice(ops={op: "liger"}), system_of(device)).kernel
    return {} if kernel is None else {"liger": load_attribute(kernel.load)}
