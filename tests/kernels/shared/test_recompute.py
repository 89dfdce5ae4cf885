from __future__ import annotations

import pytest
import torch

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.shared.recompute import computed_again, refuses


def formula(x: torch.Tensor, scale: float, w: torch.Tensor) -> torch.Tensor:
    return (w * torch.tanh(x.float() * scale)).to(x.dtype)


def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return computed_again(formula, x, 1.5, w)


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return formula(x, 1.5, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_results_and_gradients_have_the_formulas_bits(dtype, wanted):
    given = [torch.randn(6, 4).to(dtype).t(), torch.rand(6).to(dtype)]
    assert_matches(ours, plain, given, wanted, exact=True)


def test_keeps_its_operands_alone():
    def kept(function):
        saved = []
        x, w = torch.randn(8, 4, requires_grad=True), torch.rand(4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            function(x, w)
        return {each.data_ptr() for each in saved} - {x.data_ptr(), w.data_ptr()}

    assert kept(plain) and not kept(ours)


def test_second_derivative():
    given = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def function(x, w):
        return computed_again(lambda x, w: w * torch.tanh(x * w), x, w)

    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)
    x = given[0]
    (slope,) = torch.autograd.grad(function(x, x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad((x * torch.tanh(x * x)).sum(), x, create_graph=True)
    torch.testing.assert_close(slope, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (slope, expected)))


def test_one_tensor_in_two_places():
    for function in (ours, plain):
        x = torch.ones(3, requires_grad=True)
        function(x, x).sum().backward()
        torch.testing.assert_close(x.grad, 1.5 * (1 - torch.tanh(1.5 * x) ** 2) + torch.tanh(1.5 * x))


@pytest.mark.parametrize("inside", [True, False])
def test_the_backward_has_the_forwards_autocast(inside):
    seen = []

    def product(x, w):
        seen.append(torch.is_autocast_enabled("cpu"))
        return x @ w

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in "xw")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        y = computed_again(product, x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        y.sum().backward()
    assert seen == [inside, inside]
    assert y.dtype is (torch.bfloat16 if inside else torch.float32)


def test_a_compiler_sees_the_formula():
    seen = []

    def backend(graph, example_inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    x, w = torch.randn(3, requires_grad=True), torch.rand(3)
    torch.compile(ours, backend=backend, fullgraph=True)(x, w).sum().backward()
    assert torch.tanh in seen


def test_refuses():
    x, w = torch.randn(3), torch.rand(3)
    assert refuses(None, x, 1.5, w, None) is None
    assert "Strange" in refuses(None, x, 1.5, w.as_subclass(Strange))
    seen = []
    torch.func.grad(lambda x: seen.append(refuses(None, x, w)) or x.sum())(x)
    assert seen[0] is not None


class Strange(torch.Tensor):
    pass


def test_operands_that_are_named():
    given = [torch.randn(6, 4), torch.rand(6, 1)]
    assert_matches(lambda x, w: computed_again(formula, x, w=w, scale=1.5), plain, given, exact=True)
