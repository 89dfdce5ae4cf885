"""Calls of qk_norm_rotary."""

import torch

from tests.kernels.contract import DEVICE, Case

#: Batch, heads of queries and keys, length, head_dim, what turns of it.
SIZES = [
    (2, 2, 1, 2, 8, 8), (1, 5, 1, 7, 12, 12), (2, 40, 3, 2, 128, 128), (0, 4, 2, 3, 8, 8), (2, 4, 2, 0, 8, 8),
]  # fmt: skip
PARTIAL = [(2, 2, 1, 2, 8, 4), (3, 2, 2, 1, 6, 4), (2, 3, 3, 2, 24, 10)]


def operands(size, dtype, others):
    """q, k ``[batch, heads, length, head_dim]`` as projections give them, weights, cos and sin."""
    batch, q_heads, k_heads, length, columns, width = size
    q, k = (
        torch.randn(batch, length, heads, columns).transpose(1, 2).to(dtype) for heads in (q_heads, k_heads)
    )
    weights = [(torch.rand(columns) + 0.5).to(others) for _ in "qk"]
    cos, sin = (torch.randn(1, length, width).to(dtype) for _ in "cs")
    return {
        "q": q, "k": k, "q_weight": weights[0], "k_weight": weights[1], "q_eps": 1e-3, "k_eps": 1e-5, "cos": cos,
        "sin": sin,
    }  # fmt: skip


def case(variant):
    partial = variant.endswith("partial")
    # The width of most models, and an odd one.
    turned = [(width, width // 2 if partial else width) for width in (128, 80)]
    return Case(
        operands,
        PARTIAL if partial else SIZES,
        gpu=[(2, 32, 8, 9, *widths) for widths in turned],
        rows=("q", "k"),
        fixed=("cos", "sin"),
        # Rules are asked about norms and functions; what does not fit is computed by the formula.
        rule=None,
        kept={"torch": 2} if variant.startswith("cast_before_weight") else {},
        # The interpreter cuts bfloat16 off where everything else rounds.
        tolerance={} if DEVICE == "cuda" else {torch.bfloat16: 6e-2},
    )
