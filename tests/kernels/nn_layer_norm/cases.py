"""Calls of torch's LayerNorm, with the parameters that it may have."""

from functools import partial

import torch
from torch import nn

from tests.kernels.contract import Case

EPS = 1e-3
#: Of rows, and how many parameters there are: weight and bias, a weight alone, none.
SIZES = [
    ((3, 5, 8), 2), ((3, 5, 7), 1), ((3, 5, 7), 0), ((2, 0, 8), 2), ((1, 3), 1), ((129, 33), 2), ((2, 3, 4, 128), 0),
]  # fmt: skip
GPU = [((64, columns), parameters) for columns in (128, 1152, 4096, 12288) for parameters in (2, 1, 0)]
ONE_DTYPE = {("dtypes", "triton"): "a rule refuses all others"}


def operands(rows, size, dtype, others):
    """Tensors of these names, then the parameters."""
    shape, parameters = size
    made = {name: (torch.randn(shape) + 0.5).to(dtype) for name in rows}
    made |= {
        "weight": (torch.rand(shape[-1]) + 0.5).to(others),
        "bias": (torch.rand(shape[-1]) - 0.5).to(others),
    }
    norm = nn.LayerNorm(shape[-1], EPS, elementwise_affine=parameters > 0, bias=parameters > 1)
    return {"norm": norm, **dict(list(made.items())[: len(rows) + parameters])}


def called(count, function, norm, *operands):
    """Call a function with ``count`` tensors and a norm of the other operands."""
    rows, parameters = operands[:count], operands[count:]
    # As plain tensors, so that what is computed has their gradients.
    norm._parameters.update(zip(("weight", "bias"), parameters, strict=False))
    return function(*rows, norm)


CASES = {
    "rounded_once": Case(
        partial(operands, ["hidden_states"]),
        SIZES,
        batch=((64, 130), 2),
        gpu=GPU,
        deep=((2, 3, 4, 6), 2),
        call=partial(called, 1),
        rule=partial(called, 1),
        unlike=ONE_DTYPE,
    )
}
