"""Gated activations with Liger's Triton kernels, only if selected by name: SiLU, and GELU by tanh.

Mutates: backward overwrites gate and up with their gradients if they are contiguous. Nothing else reads these
results of projections, but a second backward through the same graph (``retain_graph=True``) would read
gradients in place of gate and up. Halves of one projection are copied first. Saved: gate, up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction

from veomni_hook.kernels.gated_mlp import reference
from veomni_hook.kernels.shared.activations import name_of, unknown
from veomni_hook.kernels.shared.autograd import differentiated_once
from veomni_hook.kernels.shared.operand_checks import DTYPES, not_plain, untraceable

__all__ = ["product", "refuses"]

_FUNCTIONS: dict[str | None, Any] = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}
#: The longest row that a Liger program supports.
_MOST_COLUMNS = 65536


def product(
    gate: torch.Tensor, up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return ``activation(gate) * up``, all ``[..., intermediate]``; falls back to the formula."""
    unfit = (
        not_plain(gate, up) is not None
        or gate.dtype not in DTYPES
        or gate.dtype is not up.dtype
        or gate.shape != up.shape
        or not gate.numel()
        or gate.shape[-1] > _MOST_COLUMNS
    )
    if unfit:
        return reference.product(gate, up, activation)
    return differentiated_once("gated_mlp=liger", _FUNCTIONS[name_of(activation)].apply(gate, up))


def refuses(owner: object, x: torch.Tensor, activation: object) -> str | None:
    """Return why this call of the MLP ``owner`` must run the upstream code, or None."""
    name = name_of(activation)
    if name not in _FUNCTIONS:
        return f"the activation {name} is not supported" if name is not None else unknown(activation)
    return not_plain(x) or untraceable()
