"""Calls of row_merge."""

from __future__ import annotations

import torch

from tests.kernels.contract import DEVICE, Case, in_order

MASKS = ["alternating", "none", "all", "a run", "the last"]


def mask_of(name: str, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    places = torch.arange(count, device=DEVICE).view(shape)
    return {
        "none": places < 0,
        "all": places >= 0,
        "alternating": places % 2 == 1,
        "a run": places // 3 == 1,
        "the last": places == count - 1,
    }[name]


def operands(variant, size, dtype, others):
    name, *shape = size if isinstance(size, tuple) else (size, 2, 6, 40)
    mask = mask_of(name, *shape[:-1])
    x, source = torch.randn(shape).to(dtype), torch.randn(int(mask.sum()) or 1, shape[-1]).to(dtype)
    if variant == "rows":
        mask = mask.unsqueeze(-1)
    elif name == "none":
        source = source[:0]
    made = {
        "inputs": x,
        "hidden_states": x,
        "mask": mask,
        "source": source,
        "method": torch.Tensor.masked_scatter,
    }
    return in_order("row_merge", variant, made)


def case(variant):
    return Case(
        lambda *of: operands(variant, *of),
        MASKS,
        # The width of most models, an odd one, and one in several parts.
        gpu=[("alternating", 64, columns) for columns in (128, 4096, 130, 5120)],
        rows=("inputs" if variant == "rows" else "hidden_states",),
        exact=("torch", "triton") if variant == "rows" else ("torch",),
    )
