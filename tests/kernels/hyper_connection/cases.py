"""Calls of hyper_connection."""

from __future__ import annotations

import torch
from torch import nn

from tests.kernels.contract import DTYPES, Case, in_order
from veomni_hook.kernels.rms_norm.reference import unweighted_rounded_scale

#: Streams, tokens, columns: the usual number, an odd width in several blocks, and other numbers of streams.
SIZES = [(4, (2, 2), 12), (4, (1, 37), 72), (4, (2, 3), 1030), (2, (3, 1), 33), (8, (1, 5), 20)]


class Norm(nn.Module):
    eps = 1e-4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unweighted_rounded_scale(x, self.eps)


NORM = Norm()


def operands(variant, size, dtype, others):
    streams, tokens, columns = size
    mixes = (2 + streams) * streams if variant == "sinkhorn" else streams
    made = {
        "hidden_streams": torch.randn(*tokens, streams, columns).to(dtype),
        "norm": NORM,
        "norm_class": Norm,
        "fn": torch.randn(mixes, streams * columns) / 10,
        "base": torch.randn(mixes),
        "scale": torch.randn(3 if variant == "sinkhorn" else 1),
        "streams": streams,
        "iterations": 4,
        "eps": 1e-3,
        "post": torch.randn(*tokens, streams),
        "comb": torch.randn(*tokens, streams, streams),
        "output": torch.randn(*tokens, columns).to(dtype),
        "dtype": dtype,
    }
    return in_order("hyper_connection", variant, made)


def case(variant):
    return Case(
        lambda *of: operands(variant, *of),
        SIZES,
        rows=("hidden_streams", "post", "comb", "output") if variant == "mix" else ("hidden_streams",),
        exact=("torch",),
        # Sums of four thousand products, and gradients that are differences of them.
        tolerance={torch.float32: 2e-5},
        dtypes=DTYPES[:2],
        # A token's weights before they are normalised, and its scale.
        kept={"triton": 1} if variant == "sinkhorn" else {},
    )
