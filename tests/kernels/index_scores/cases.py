"""Calls of index_scores."""

import torch

from tests.kernels.contract import DEVICE, DTYPES, Case
from veomni_hook.kernels.selection.registry import registry

#: Batch, queries, keys, heads, width: one query, more than a tile of each, odd numbers, nothing.
SIZES = [
    (2, 5, 7, 2, 16), (2, 1, 1, 1, 1), (2, 67, 133, 3, 24), (1, 3, 130, 4, 128), (1, 70, 5, 2, 33), (1, 3, 0, 2, 16),
    (1, 0, 3, 2, 16),
]  # fmt: skip


def operands(size, dtype, others):
    batch, queries, keys, heads, width = size
    return {
        "query": torch.randn(batch, queries, heads, width).to(dtype),
        "key": torch.randn(batch, keys, width).to(dtype),
        "weights": torch.randn(batch, queries, heads),
        "scale": 0.3,
    }


CASE = Case(
    operands,
    SIZES,
    # Heads of the usual width, of an odd one and of the widest, and few queries.
    gpu=[(2, 300, 333, 64, 128), (2, 1, 333, 64, 128), (2, 70, 333, 6, 100), (2, 70, 333, 4, 256)],
    gpu_dtypes=(torch.bfloat16, torch.float32),
    rows=("query", "key", "weights"),
    rule=lambda rule, query, key, weights, scale: rule(query, key, scale),
    exact=("torch",),
    unlike={("dtypes", "triton"): "one dtype alone"} if DEVICE == "cpu" else {},
    dtypes=DTYPES if DEVICE == "cuda" else DTYPES[:2],
)
CASES = dict.fromkeys(registry.ops()["index_scores"].variants, CASE)
