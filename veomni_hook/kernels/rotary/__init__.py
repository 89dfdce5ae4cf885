"""Rotary position embedding of queries and keys.

Called as ``kernel(query, key, cos, sin)``: ``query`` and ``key`` ``[batch, heads, length, head_dim]``,
``cos`` and ``sin`` ``[batch or 1, length, head_dim]``. Guards pass the upstream function to ``slot.kernel``
as a last operand, so that a kernel that transformers' own ``use_kernels`` put in its place is respected.
"""

from __future__ import annotations

from veomni_hook.kernels.registry import Kernel, Op

OP = Op(
    "rotary",
    variants={"half_split": "x * cos + concat(-x2, x1) * sin, x = concat(x1, x2), over the full head_dim"},
)

KERNELS = (
    Kernel(
        op="rotary",
        variant="half_split",
        backend="torch",
        load="veomni_hook.kernels.rotary.torch:rotary",
        refuses="veomni_hook.kernels.rotary.torch:refuses",
        loses="veomni_hook.kernels.rotary.torch:loses",
        description="the rotation on halves in place, forward and backward, bit for bit",
    ),
)
