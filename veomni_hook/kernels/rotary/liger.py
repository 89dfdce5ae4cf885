"""Rotary embedding by Liger's Triton kernel, for who asks for it by name.

Liger reads the first half of cos and sin only: the second must repeat it, as rotary modules of this variant
make it. Mutates: queries and keys that are views of contiguous ``[batch, length, heads, head_dim]`` memory
become the result, and gradients in that order those of the input. Autograd is told of the former, so that
where another operation needs a query or key for its backward, that is an error and no wrong gradient. It is
not told of the latter: a hook that keeps a gradient of the result sees it change.
Saved: cos, sin.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.rope import LigerRopeFunction

from veomni_hook.kernels.rotary import calls

__all__ = ["refuses", "rotary"]


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``q`` and ``k`` ``[batch, heads, length, head_dim]``, in their memory where it can."""
    for given in (q, k):
        # Before the call: the results are views of the same memory.
        if given.transpose(1, 2).is_contiguous():
            torch.autograd.graph.increment_version(given)
    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)  # type: ignore[no-any-return]


def refuses(owner: Any, *operands: Any) -> str | None:
    """Return why this call must run the upstream code, or None."""
    reason = calls.refuses(owner, *operands)
    if reason is not None:
        return reason
    q, k, cos, _, heads_at, _ = operands
    if q.dtype is not cos.dtype:
        return "Liger computes in the dtype of cos and sin, which is not the query's"
    if q.ndim != 4 or heads_at not in (1, -3):
        return "Liger takes [batch, heads, length, head_dim]"
    for x in (q, k):
        if x.requires_grad and x.is_leaf:
            return "Liger would write into a parameter"
    return None
