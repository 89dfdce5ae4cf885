"""Index scores of sparse attention, as in a layer of DeepSeek-V3.2: 64 heads of 128.

Work counts products: 2 per pair, head and column forward, 6 backward (the scores are recomputed). Upstream
multiplies in float32; ours multiplies bfloat16, which gives the same products. ``pieces`` is the form in
PyTorch. Upstream's tensor over heads takes 64 GiB at 16,384 positions, once before relu and once after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.index_scores import torch as pieces
from veomni_hook.kernels.problem import Problem, made, sides_of

__all__ = ["problems"]

_OP, _VARIANT = "index_scores", "relu_matmul"
# Batch, queries (as many keys), heads and width.
_ACCELERATOR = ((1, 4096, 64, 128), (1, 16384, 64, 128), (4, 2048, 64, 128))
_CPU = ((1, 256, 8, 64),)


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for batch, positions, heads, width in sizes[:2] if quick else sizes:
        query = made(batch, positions, heads, width, device=device)
        key = made(batch, positions, width, device=device)
        weights = made(batch, positions, heads, device=device, dtype=torch.float32) * heads**-0.5
        scale = width**-0.5
        sides = sides_of(_OP, _VARIANT, device, scale=scale)
        flops = 2 * batch * positions**2 * heads * width
        yield Problem(
            op=_OP,
            shape=f"{batch} x {positions} x {positions}, {heads} heads of {width}",
            leaves=(query, key, weights),
            sides={**sides, "pieces": partial(pieces.relu_matmul, scale=scale)},
            limit="flops",
            work={"forward": flops, "step": 4 * flops},
            incoming={"backward": [torch.randn(batch, positions, positions, device=device)]},
        )
