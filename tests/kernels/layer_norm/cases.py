"""Calls of layer_norm."""

import torch

from tests.kernels.contract import DEVICE, Case, in_order

EPS = 1e-5
#: Of rows, and how many of their dimensions the parameters have: with two, there is a weight for each group. A single row
#: is not narrower: of three columns, the gradient has one direction left, which may be as small as what rounding leaves.
#: On a GPU, rows that are no multiple of four have other last bits without gradients: the first has no such rows.
SIZES = [
    ((3, 5, 8), 1), ((2, 0, 8), 1), ((0, 8), 1), ((1, 17), 1), ((129, 33), 1), ((2, 3, 4, 128), 1),
]  # fmt: skip
GPU = [((64, columns), 1) for columns in (128, 4096, 12288, 130)]
GPU_GROUPS = [((64, 4, 128), 2), ((64, 1, 4096), 2), ((64, 1, 12288), 2), ((64, 4, 130), 2)]
GROUPS = [((2, 5, 3, 16), 2), ((67, 2, 24), 2), ((3, 1, 8), 2), ((4, 0, 8), 2)]
#: torch's operator on a CPU sums the weight's gradient in the dtype of the rows, 129 here. Rules refuse that where the
#: weight wants a gradient; the contract asks them without.
SUMMED_IN_16_BITS = {("torch", torch.bfloat16): 4e-2}
ONE_DTYPE = {("dtypes", "torch"): "torch's operator takes rows and a weight of one dtype"}


def operands(variant, size, dtype, others):
    shape, dimensions = size
    if variant == "weight_and_bias_before_cast":
        others = torch.float32  # all that upstream's operator takes
    weight, bias = (torch.rand(shape[-dimensions:]) + offset for offset in (0.5, -0.5))
    made = {
        "hidden_states": (torch.randn(shape) + 0.5).to(dtype),
        "normalized_shape": shape[-1:],
        "weight": weight.to(others),
        "bias": bias.to(others),
        "eps": EPS,
    }
    return in_order("layer_norm", variant, made)


def case(variant):
    grouped = variant not in {"weight_and_bias_before_cast", "unweighted"}
    return Case(
        lambda *of: operands(variant, *of),
        [*SIZES, *(GROUPS if grouped else ())],
        batch=((64, 130), 1),
        gpu=[*GPU, *(GPU_GROUPS if grouped else ())],
        deep=((2, 3, 4, 6), 1),
        tolerance=SUMMED_IN_16_BITS if variant == "weight_before_cast" and DEVICE == "cpu" else {},
        unlike=ONE_DTYPE if variant == "weight_before_cast" else {},
    )
