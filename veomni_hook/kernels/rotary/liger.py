"""Rotary embedding with Liger's Triton kernel, only if selected by name.

Forward:  y = x * cos + turn(x) * sin,  turn(x) = (-x2, x1) on halves
Backward: dx = dy * cos + turn'(dy) * sin,  turn'(dy) = (dy2, -dy1); in the dtype of cos and sin
Shapes: q, k [batch, heads, length, head_dim]; cos, sin [batch or 1, length, head_dim].
Liger reads only the first half of cos and sin: the second must repeat it, as in rotary modules of this
variant. Its kernel overwrites its inputs. Autograd cannot track that if a query is a view of another
function's result, and a hook may keep a gradient; so the kernel gets copies, one extra pass over memory each
way. Saved: cos, sin. Mutates: nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.rope import rope_backward, rope_forward

from veomni_hook.kernels.rotary import operand_rules
from veomni_hook.kernels.shared.autograd import differentiated_once

__all__ = ["refuses", "rotary"]

_unfit = operand_rules.rule("half_split")


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, cos, sin = rope_forward(_to_overwrite(q), _to_overwrite(k), cos, sin)
        ctx.save_for_backward(cos, sin)
        return q, k

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk = rope_backward(_to_overwrite(dq), _to_overwrite(dk), *ctx.saved_tensors)
        return dq, dk, None, None


def _to_overwrite(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` that Liger may overwrite; in other memory orders Liger makes its own copy."""
    return x.clone() if x.transpose(1, 2).is_contiguous() else x


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``q`` and ``k`` ``[batch, heads, length, head_dim]``; ``unsqueeze_dim`` is 1."""
    q, k = _Rotary.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return differentiated_once("rotary=liger", q), differentiated_once("rotary=liger", k)


def refuses(owner: object, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = _unfit(owner, *operands)
    if reason is not None:
        return reason
    q, _, cos, _, heads_at, _ = operands
    if q.dtype is not cos.dtype:
        return "Liger computes in the dtype of cos and sin, which is not the query's"
    if q.ndim != 4 or heads_at not in (1, -3):
        return "Liger supports only [batch, heads, length, head_dim]"
    return None
