"""Derivatives of one call, in every way that torch has: what ``python -m tests.proof --derivatives`` compares.

All operands are functions of one another: each is a leaf plus a small part of the one before it, the parameters
of the module after its inputs. So a gradient that follows a path twice, or not at all, differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from tests.proof.compare import GRADIENT, MODE, RAISES, Run, tensors

#: How much of one operand is in the next.
_PART = 0.5

Leaves = dict[str, torch.Tensor]


def derivatives(call: Callable[..., Any], inputs: dict[str, Any], owner: nn.Module | None = None) -> Run:
    """Return results and derivatives by name; where torch cannot compute one, the call without it is returned.

    Raises:
        Exception: what the call itself, or its first derivative, raises.
    """
    inputs = MODE.placed(inputs, owner)
    parameters = {} if owner is None else {f"self.{n}": p for n, p in owner.named_parameters()}
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in (inputs | parameters).items()
        if MODE.is_leaf(name, value)
    }
    function = _Function(call, inputs, owner)
    # First: the last call is to be one that a kernel may take.
    found = _transformed(function, leaves)
    found |= function(leaves)
    for square in (False, True):
        named = " of squares" if square else ""
        once = _gradients(function.total(leaves, square=square), leaves)
        first = _gradients(function.total(leaves, square=square), leaves, again=True)
        found |= {f"{GRADIENT}{leaf}{named}": dx for leaf, dx in first.items()}
        found |= {f"{GRADIENT}{leaf}{named}, alone": dx for leaf, dx in once.items()}
        slope = _weighed([*first.values()])
        if slope is not None and slope.requires_grad:
            second = _gradients(slope, leaves)
            found |= {f"{GRADIENT}slope by {leaf}{named}": dx for leaf, dx in second.items()}
    return Run({name: value.detach().clone() for name, value in found.items()})


def _gradients(total: torch.Tensor, leaves: Leaves, *, again: bool = False) -> Leaves:
    """Return the gradients of the leaves that have one."""
    slopes = torch.autograd.grad(total, [*leaves.values()], create_graph=again, allow_unused=True)
    return {leaf: dx for leaf, dx in zip(leaves, slopes, strict=True) if dx is not None}


class _Function:
    """The call as a function of leaves alone."""

    def __init__(self, call: Callable[..., Any], inputs: Mapping[str, Any], owner: nn.Module | None) -> None:
        self._call, self._inputs, self._owner = call, inputs, owner

    def __call__(self, leaves: Leaves) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        chained = _chained(leaves)
        held = {name.removeprefix("self."): x for name, x in chained.items() if name.startswith("self.")}
        named = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in {**self._inputs, **chained}.items()
            if name not in {f"self.{n}" for n in held}
        }
        with _holding(self._owner, held):
            return tensors(self._call(**named))

    def total(self, leaves: Leaves, *, square: bool = False) -> torch.Tensor:
        """A weighed sum of all results that have a gradient, or of their squares."""
        results = self(leaves)
        values = [results[name] for name in sorted(results) if results[name].is_floating_point()]
        values = [value.float() for value in values if value.requires_grad or not torch.is_grad_enabled()]
        found = _weighed([value.square() / 2 if square else value for value in values])
        if found is None:
            raise ValueError("no result has a gradient")
        return found


@contextmanager
def _holding(owner: nn.Module | None, parameters: Leaves) -> Iterator[None]:
    if owner is None or not parameters:
        yield
        return
    with _reparametrize_module(owner, parameters):
        yield


def _chained(leaves: Leaves) -> Leaves:
    found: Leaves = {}
    before: torch.Tensor | None = None
    for name, leaf in leaves.items():
        x = leaf if before is None else leaf + (_PART * before.float().mean()).to(leaf.dtype)
        found[name] = before = x
    return found


def _weighed(values: list[torch.Tensor]) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(1)
    total: torch.Tensor | None = None
    for value in values:
        weights = torch.randn(value.shape, generator=generator).to(value.device)
        part = (value.float() * weights).sum()
        total = part if total is None else total + part
    return total


def _transformed(function: _Function, leaves: Leaves) -> dict[str, torch.Tensor]:
    """What torch's transforms make of the function; where they cannot, nothing."""
    bare = {name: leaf.detach() for name, leaf in leaves.items()}
    tangents = {name: torch.ones_like(leaf) for name, leaf in bare.items()}
    stacked = {name: torch.stack((leaf, leaf * 1.25)) for name, leaf in bare.items()}
    ways: dict[str, Callable[[], Any]] = {
        "func.grad": lambda: torch.func.grad(function.total)(bare),
        "jvp": lambda: torch.func.jvp(function, (bare,), (tangents,)),
        "vmap": lambda: torch.vmap(function, randomness="same")(stacked),
    }
    found: dict[str, torch.Tensor] = {}
    for way, compute in ways.items():
        try:
            found |= {f"{GRADIENT}{name} by {way}": x for name, x in tensors(compute(), "all").items()}
        except Exception as error:  # upstream's code may be what torch cannot transform
            found[f"{way}{RAISES}{type(error).__name__}"] = torch.tensor(0)
    return found
