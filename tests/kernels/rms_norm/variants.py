"""Both sides of the variants, and operands for them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from tests.kernels import declared
from veomni_hook.kernels.slot.arguments import operand_names

EPS = 1e-3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def further(variant, width):
    """Operands that are no tensors, for rows of ``width``."""
    group_size = next(size for size in range(max(width // 2, 1), 0, -1) if width % size == 0)
    made = {"eps": EPS, "group_size": group_size, "activation": functional.silu}
    return {name: made[name] for name in operand_names("rms_norm", variant) if name in made}


def wide(variants):
    """Rows of more than a tile: one kind in the default suite, since the interpreter needs seconds for each."""
    every = [(variant, dtype) for variant in variants for dtype in DTYPES]
    first = ("cast_before_weight", torch.float32)
    return [pytest.param(*kind, marks=[] if kind == first else pytest.mark.slow) for kind in every]


def pair(backend: str, variant: str, width: int = 1):
    """The kernel of a backend and the reference of a variant, for rows of ``width``."""
    return [partial(each, **further(variant, width)) for each in declared.pair("rms_norm", variant, backend)]


def inputs(variant, shape, dtype, weight_dtype=None, device="cpu"):
    """Operands that are tensors."""
    operands = operand_names("rms_norm", variant)
    given = [torch.randn(shape).to(device, dtype) for name in ("hidden_states", "gate") if name in operands]
    if "weight" in operands:
        given.append((torch.rand(shape[-1]) + 0.5).to(device, weight_dtype or dtype))
    return given
