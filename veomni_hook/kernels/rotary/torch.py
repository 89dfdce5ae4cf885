"""Half-split rotary embedding without the rotated copies, and with its own backward.

Forward:  y1 = x1*cos1 - x2*sin1,  y2 = x2*cos2 + x1*sin2   (x = concat(x1, x2) over head_dim)
Backward: dx1 = dy1*cos1 + dy2*sin2,  dx2 = dy2*cos2 - dy1*sin1
Shapes: q, k [batch, heads, length, head_dim] (unsqueeze_dim 1) or [batch, length, heads, head_dim] (2);
cos, sin [batch or 1, length, head_dim]; one dtype.
Saved: cos, sin. Mutates: nothing. Products and sums round as in upstream, so results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from veomni_hook.kernels.shared.autograd import differentiable
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable, wants_grad

__all__ = ["loses", "refuses", "rotary"]

# Forward only, on 2 cores: equal at 16 heads x 1,024 positions x 128 in bfloat16, 1.7 times as fast at four
# times that, and 25 us slower for one position of 4 heads x 64. With a backward, it was faster at every size.
FORWARD_ONLY_ELEMENTS = 1 << 22


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


#: Takes x, cos and sin.
_rotated: Callable[..., torch.Tensor] = differentiable(
    _rotate,
    lambda saved, rest, wanted, dy: (_unrotate(dy, *saved[1:]), None, None),
    None,
    tensors=3,
    unread=1,
)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``q`` and ``k``, with unchanged shapes and dtype.

    ``cos`` and ``sin`` are ``[batch or 1, length, head_dim]``, of the same dtype, and get no gradient.
    ``unsqueeze_dim`` is the heads dimension of ``q`` and ``k``: 1 or 2 of four.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def refuses(owner: object, *operands: Any) -> str | None:  # noqa: PLR0911 - one return a refusal
    """Return why this call must run the upstream code, or None.

    ``operands`` are all operands of `rotary`, and the upstream function.
    """
    q, k, cos, sin, heads_at, _ = operands
    reason = not_plain(q, k, cos, sin) or untraceable()
    if reason is not None:
        return reason
    if not (q.dtype is k.dtype is cos.dtype is sin.dtype) or not q.is_floating_point():
        return "query, key, cos and sin have different dtypes"
    if type(heads_at) is not int or heads_at not in (1, 2):
        return f"unsqueeze_dim is {heads_at!r}, not 1 or 2"
    of_query, of_key, of_cos = q.shape, k.shape, cos.shape
    if len(of_query) != 4 or len(of_key) != 4 or len(of_cos) != 3 or of_cos != sin.shape:
        return "query and key do not have four dimensions, or cos and sin are not [batch, length, head_dim]"
    batch, length, width = of_cos
    if width % 2 or of_query[3] != width or of_key[3] != width:
        return "cos and sin do not have the head_dim of query and key, or it is odd"
    length_at = 3 - heads_at
    if of_query[length_at] != length or of_key[length_at] != length:
        return "cos and sin do not match the positions or the batch of query or key"
    if batch != 1 and not batch == of_query[0] == of_key[0]:
        return "cos and sin do not match the positions or the batch of query or key"
    if cos.requires_grad or sin.requires_grad:
        return "cos or sin requires a gradient"
    return None


def loses(owner: object, *operands: Any) -> str | None:
    """Return why upstream was measured to be faster here, or None."""
    q, k = operands[:2]
    if q.numel() < FORWARD_ONLY_ELEMENTS and not wants_grad(q, k):
        return "without gradients, upstream's code is as fast at this size"
    return None
