"""Gated activations in PyTorch that save only gate and up for backward.

Gated SiLU has its own backward:

Forward:  y = s * up,  s = silu(gate)
Backward: dup = dy * s,  dgate = (dy * up) * silu'(gate)
Shapes: gate, up, y [..., intermediate], one dtype.
Saved: gate, up; s is recomputed. Mutates: nothing. Results are bitwise equal to upstream's.

Other formulas are recomputed in their backward (`veomni_hook.kernels.shared.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from veomni_hook.kernels.gated_mlp import reference
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable

__all__ = ["clamped_silu", "gated_silu", "loses", "refuses", "refuses_others"]


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate).mul_(up)


def _gradients(
    saved: Sequence[torch.Tensor], _: object, wanted: Sequence[bool], dy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    gate, up = saved
    dup = dy * functional.silu(gate) if wanted[1] else None
    return torch.ops.aten.silu_backward(dy * up, gate) if wanted[0] else None, dup


_gated_silu: Callable[..., torch.Tensor] = differentiable(
    _forward, _gradients, partial(reference.product, activation=functional.silu), tensors=2
)


def gated_silu(
    gate: torch.Tensor, up: torch.Tensor, activation: Callable[..., torch.Tensor] = functional.silu
) -> torch.Tensor:
    """Return ``silu(gate) * up``, all ``[..., intermediate]``; `refuses` has checked ``activation``."""
    # The projections have run, so unsupported operands that they return are computed with upstream's formula.
    if not_plain(gate, up) is not None or gate.dtype is not up.dtype or gate.shape != up.shape:
        return functional.silu(gate) * up
    if torch.compiler.is_compiling():
        # A compiler decides itself what to save. In a custom backward, dynamo (torch 2.11) traces the branch
        # for second derivatives, and gradients become zeros.
        return functional.silu(gate) * up
    return _gated_silu(gate, up)


def clamped_silu(
    gate: torch.Tensor, up: torch.Tensor, activation: Callable[..., torch.Tensor], limit: float
) -> torch.Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up, -limit, limit)``, all ``[..., intermediate]``."""
    return gated_silu(gate.clamp(max=limit), up.clamp(min=-limit, max=limit))


def refuses_others(owner: object, x: torch.Tensor, activation: object = torch.sigmoid) -> str | None:
    """`refuses` for formulas other than SiLU; a guard without an activation means a sigmoid.

    An unknown activation may have parameters, whose gradients would be lost.
    """
    return unknown(activation) if name_of(activation) is None else not_plain(x) or untraceable()


def refuses(owner: object, x: torch.Tensor, activation: object) -> str | None:
    """Return why this call of the MLP ``owner`` must run the upstream code, or None."""
    if activation is not functional.silu and name_of(activation) != "silu":
        return unknown(activation)
    return not_plain(x) or untraceable()


def loses(owner: object, x: torch.Tensor, activation: object) -> str | None:
    """Return why upstream was measured to be faster here, or None."""
    # Forward and backward, 2,048 x 3,072 in bfloat16 on 2 cores: 15 % slower, because silu runs twice.
    if torch.is_grad_enabled():
        return "with gradients it saves memory but takes longer; choose torch by name to use it"
    return None
