"""Derivatives of gradients with the npu kernels, on the double: their backward differentiates the formula."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.matching import close
from tests.kernels.varlen_attention.test_torch import OPTIONS, operands
from veomni_hook.kernels.add_rms_norm import npu as added
from veomni_hook.kernels.add_rms_norm import reference as added_reference
from veomni_hook.kernels.gated_mlp import npu as mlp
from veomni_hook.kernels.gated_mlp import reference as mlp_reference
from veomni_hook.kernels.moe_router import npu as router
from veomni_hook.kernels.moe_router import reference as router_reference
from veomni_hook.kernels.rms_norm import npu as norms
from veomni_hook.kernels.rms_norm import reference as norms_reference
from veomni_hook.kernels.varlen_attention import npu as attention
from veomni_hook.kernels.varlen_attention import reference

pytestmark = pytest.mark.usefixtures("operators")

EPS = 1e-3
#: The kernel, its formula, and the shapes of their operands.
CALLS = {
    "rms_norm": (norms.cast_before_weight, norms_reference.cast_before_weight, (EPS,), [(3, 6), (6,)]),
    "add_rms_norm": (
        added.cast_before_weight, added_reference.of("cast_before_weight"), (EPS,), [(3, 6), (3, 6), (6,)],
    ),
    "gated_mlp": (mlp.product, mlp_reference.product, (functional.silu,), [(3, 6), (3, 6)]),
    "softmax": (router.softmax_topk, router_reference.softmax_topk, (2, False), [(5, 6)]),
    "softmax, normalised": (router.softmax_topk, router_reference.softmax_topk, (2, True), [(5, 6)]),
}  # fmt: skip


def derivatives(function, rest, shapes):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    # Every operand depends on the one before it.
    operands = [
        leaf + 0.5 * before.mean() for leaf, before in zip(leaves, [torch.zeros(1), *leaves], strict=False)
    ]
    results = function(*operands, *rest)
    results = [results] if isinstance(results, torch.Tensor) else results
    found = []
    for power in (1, 2):
        total = sum(
            (y.pow(power) * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum()
            for y in results
            if y.requires_grad
        )
        first = torch.autograd.grad(total, leaves, create_graph=True)
        slope = sum(dx.square().sum() for dx in first)
        second = (
            torch.autograd.grad(slope, leaves, retain_graph=True, allow_unused=True)
            if slope.requires_grad
            else ()
        )
        found += [
            *first,
            *(torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, second, strict=False)),
        ]
    return found


@pytest.mark.parametrize("name", CALLS)
def test_first_and_second_derivatives_are_the_formulas(name):
    kernel, formula, rest, shapes = CALLS[name]
    expected = derivatives(formula, rest, shapes)
    found = derivatives(kernel, rest, shapes)
    assert len(found) == len(expected)
    close(found, expected, 2e-5)


def test_attention_by_segment():
    tensors, bounds = operands([3, 4])
    hidden = torch.randn_like(tensors[0]).requires_grad_()

    def derivatives_of(run):
        query = hidden.sin()  # all operands depend on it
        key, value = (each.requires_grad_() * query[:, : each.shape[1]] for each in tensors[1:])
        y = run(query, key, value, bounds, None, OPTIONS)
        (first,) = torch.autograd.grad(y.square().sum(), hidden, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), [hidden, *tensors[1:]])

    expected = derivatives_of(reference.full)
    close(derivatives_of(attention.full), expected, 2e-5)
