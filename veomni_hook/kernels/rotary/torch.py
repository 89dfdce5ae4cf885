"""Half-split rotary embedding without the rotated copies, and with a backward of its own.

Forward:  y1 = x1*cos1 - x2*sin1,  y2 = x2*cos2 + x1*sin2   (x = concat(x1, x2) over head_dim)
Backward: dx1 = dy1*cos1 + dy2*sin2,  dx2 = dy2*cos2 - dy1*sin1
Shapes: query, key [batch, heads, length, head_dim]; cos, sin [batch or 1, length, head_dim]; one dtype.
Saved: cos, sin. Mutates: nothing. Each product and sum rounds as upstream's does, so results are equal bits.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from veomni_hook.kernels.operands import not_plain, untraceable, wants_grad

__all__ = ["loses", "refuses", "rotary"]

# Forward alone on 2 cores: 16 heads x 1,024 positions x 128 in bfloat16 is a tie, four times that is 1.7
# times faster, and one position of 4 heads x 64 is 25 us slower. With a backward it won at every size.
FORWARD_ONLY_ELEMENTS = 1 << 22


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _unrotate(grad, *ctx.saved_tensors), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].sub_(x[..., half:] * sin[..., :half])
    rotated[..., half:].add_(x[..., :half] * sin[..., half:])
    return rotated


def _unrotate(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = grad.shape[-1] // 2
    unrotated = grad * cos
    unrotated[..., :half].add_(grad[..., half:] * sin[..., half:])
    unrotated[..., half:].sub_(grad[..., :half] * sin[..., :half])
    return unrotated


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``query`` and ``key``, both ``[batch, heads, length, head_dim]`` like the inputs.

    ``cos`` and ``sin`` are ``[batch or 1, length, head_dim]``, of the same dtype, and get no gradient.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotary(query, cos, sin), _rotary(key, cos, sin)


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if wants_grad(x):
        return _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call,no-any-return]
    return _rotate(x, cos, sin)


def refuses(owner: Any, *operands: Any) -> str | None:  # noqa: PLR0911 - one return a refusal
    """Return why this call must run the upstream code, or None.

    ``operands`` are query, key, cos, sin and the upstream function.
    """
    query, key, cos, sin, upstream = operands
    reason = not_plain(query, key, cos, sin) or untraceable()
    if reason is not None:
        return reason
    if type(upstream) is not FunctionType:
        return "a kernel from the hub stands in the place of the upstream function"
    if not (query.dtype is key.dtype is cos.dtype is sin.dtype) or not query.is_floating_point():
        return "query, key, cos and sin have different dtypes"
    of_query, of_key, of_cos = query.shape, key.shape, cos.shape
    if len(of_query) != 4 or len(of_key) != 4 or len(of_cos) != 3 or of_cos != sin.shape:
        return "operands are not [batch, heads, length, head_dim] and [batch, length, head_dim]"
    batch, length, width = of_cos
    if width % 2 or of_query[3] != width or of_key[3] != width:
        return "cos and sin do not cover exactly an even head_dim"
    if of_query[2] != length or of_key[2] != length or (batch != 1 and not batch == of_query[0] == of_key[0]):
        return "cos and sin broadcast query or key to another shape"
    if cos.requires_grad or sin.requires_grad:
        return "cos or sin requires a gradient"
    return None


def loses(owner: Any, *operands: Any) -> str | None:
    """Return where upstream was measured to be faster, or None."""
    query, key = operands[:2]
    if query.numel() < FORWARD_ONLY_ELEMENTS and not wants_grad(query, key):
        return "without gradients upstream is as fast at this size"
    return None
