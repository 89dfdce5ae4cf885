"""One operation at one size: operands, the sides that compute it, and how much work it is.

``kernels/<op>/bench.py``, and ``bench_<part>.py`` for other problems of the op, has
``problems(device, quick)``, which yields what `veomni_hook.tools.bench` measures. Another library
is called there as its users call it; what an installed release of it does not have is a failed side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.selection.select import select, system_of

__all__ = ["QUACK", "Package", "Problem", "Results", "Side", "beside", "formula", "made", "peer", "sides_of"]

Results = torch.Tensor | tuple[torch.Tensor, ...]
Side = Callable[..., Results]


class Package(NamedTuple):
    """Another library of kernels: the name that is imported, and its distribution's."""

    name: str
    distribution: str


QUACK = Package("quack", "quack-kernels")


@dataclass(frozen=True)
class Problem:
    """What is measured.

    Attributes:
        op: its name.
        shape: for people.
        leaves: the operands that get gradients; every side is called with these, in this order.
        sides: what computes it, by name; ``eager`` is the upstream code.
        incoming: gradients of the results, by the name of the part that they are measured as, a backward
            through a graph that is kept; where it is empty, the result is a scalar.
        limit: what bounds it: bytes that move, floating-point operations, or its own ``products``.
        work: how many bytes or operations each part needs at least; what is not there is not measured.
            ``step`` is forward and backward, with the memory that they take.
        products: where they are the limit, the matrix products of a step and nothing else, called like a
            side and timed by turns with the sides; ``work`` then has the part ``step``, and another part's
            limit is its share of that work.
        spoils: sides whose backward writes into the gradient that it is given.
        absent: peers that are not among the sides here, and why.
    """

    op: str
    shape: str
    leaves: Sequence[torch.Tensor]
    sides: Mapping[str, Side]
    limit: Literal["bytes", "flops", "products"]
    work: Mapping[str, int]
    products: Side | None = None
    incoming: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    spoils: frozenset[str] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict)

    def only(self, sides: Sequence[str]) -> Problem:
        """Return the problem with these sides alone.

        Raises:
            KernelError: there is none of this name.
        """
        if unknown := [side for side in sides if side not in (*self.sides, *self.absent)]:
            known = ", ".join((*self.sides, *self.absent))
            raise KernelError(
                f"{self.op} has no implementation {unknown[0]!r}",
                where="bench --side",
                fix=f"choose of: {known}",
            )
        kept = {name: call for name, call in self.sides.items() if name in sides}
        return replace(self, sides=kept, absent={k: why for k, why in self.absent.items() if k in sides})

    @property
    def dtype(self) -> str:
        """The dtype of the first operand."""
        return str(self.leaves[0].dtype).removeprefix("torch.")


def made(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Seeded normal values."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def formula(op: str, variant: str) -> Callable[..., Any]:
    """The reference of a variant."""
    return load_attribute(registry.ops()[op].variants[variant].reference)


def beside(op: str, variant: str, device: str) -> dict[str, Side]:
    """The sides ``liger``, by our adapter, and ``ours``, what ``auto`` picks: those that run here."""
    sides = {}
    for name, choice in (("liger", Choice(ops={op: "liger"})), ("ours", Choice())):
        kernel = select(op, variant, choice, system_of(device)).kernel
        if kernel is not None:
            sides[name] = load_attribute(kernel.load)
    return sides


def peer(
    device: str, name: str, call: Side | str, package: Package = QUACK
) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the sides ``{name: call}`` of another library, and why there is none; one of both is empty.

    ``call`` is a reason where the library has no such kernel. On a CPU, where it has none, both are empty.
    """
    if device != "cuda":
        return {}, {}
    if find_spec(package.name) is None:
        return {}, {name: f"{package.distribution} is not installed"}
    return ({}, {name: call}) if isinstance(call, str) else ({name: call}, {})


def sides_of(
    op: str,
    variant: str,
    device: str,
    *,
    eager: Side | None = None,
    call: Side | None = None,
    **fixed: object,
) -> dict[str, Side]:
    """``eager``, it compiled, and what `beside` returns, as sides of the leaves.

    Args:
        op, variant, device: what `beside` gets.
        eager: the upstream code, if it is not the formula.
        call: how a kernel is called, if not with the leaves: ``call(kernel, *leaves, **fixed)``.
        fixed: operands that are no leaves, by name.
    """

    def side(kernel: Side) -> Side:
        return partial(kernel if call is None else partial(call, kernel), **fixed)

    eager = eager or side(formula(op, variant))
    others = {name: side(kernel) for name, kernel in beside(op, variant, device).items()}
    return {"eager": eager, "compile": torch.compile(eager, dynamic=False), **others}
