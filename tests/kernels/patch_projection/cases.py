"""Calls of convolutions whose blocks do not overlap."""

import torch

from tests.kernels.contract import Case
from tests.kernels.patch_projection.convolutions import CASES as CONVOLUTIONS


def operands(name, dtype, others):
    case = CONVOLUTIONS[name]
    channels, *sizes = case.size
    made = {
        "x": torch.randn(case.batch, channels, *sizes).to(dtype),
        "weight": (torch.randn(case.out, channels, *case.kernel) * (channels * 4) ** -0.5).to(others),
    }
    if case.bias:
        made["bias"] = torch.randn(case.out).to(others)
    convolution = case.kind(channels, case.out, case.kernel, stride=case.kernel, bias=case.bias)
    return {"convolution": convolution, **made}


def called(function, convolution, x, *parameters):
    # As plain tensors, so that what is computed has their gradients.
    convolution._parameters.update(zip(("weight", "bias"), parameters, strict=False))
    return function(x, convolution)


CASES = {
    "disjoint_blocks": Case(
        operands,
        sorted(CONVOLUTIONS, key="an image".__ne__),
        rows=("x",),
        call=called,
        kept={"torch": 1},
        rule=called,
    )
}
