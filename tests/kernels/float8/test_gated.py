"""A projection in float8 behind a gated product, which it does not keep: interpreted on a CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from tests.kernels.matching import DEVICE
from veomni_hook.kernels.float8 import linear as layer
from veomni_hook.kernels.float8 import products
from veomni_hook.kernels.float8.linear import Float8Linear
from veomni_hook.kernels.gated_mlp import reference
from veomni_hook.kernels.gated_mlp import triton as kernels


class Mlp(nn.Module):
    def __init__(self, gated, *, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(32, 48, bias=bias) for _ in "gu")
        self.down = nn.Linear(48, 32, bias=bias)
        self.gated = gated
        for module in (self.gate, self.up, self.down):
            module.__class__ = Float8Linear
        self.to(DEVICE)

    def forward(self, x):
        return self.down(self.gated(self.gate(x), self.up(x), functional.silu))


def results(mlp, run=lambda mlp, x: mlp(x), length=5):
    torch.manual_seed(1)
    x = torch.randn(2, length, 32, device=DEVICE, requires_grad=True)
    y = run(mlp, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(weight.grad for weight in mlp.parameters())]


def in_checkpoint(mlp, x):
    return checkpoint(mlp, x, use_reentrant=False)


@pytest.fixture
def calls(monkeypatch):
    """What the projections behind a gated product returned."""
    made = []
    projection = layer.projection

    def noted(*operands):
        made.append(projection(*operands))
        return made[-1]

    monkeypatch.setattr(layer, "projection", noted)
    return made


@pytest.mark.parametrize("run", [lambda mlp, x: mlp(x), in_checkpoint])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [5, 8])
def test_results_are_those_of_the_formula(run, bias, length, calls):
    ours = results(Mlp(kernels.product, bias=bias), run, length)
    theirs = results(Mlp(reference.product, bias=bias), length=length)
    assert any(type(y) is torch.Tensor for y in calls)
    for one, other in zip(ours, theirs, strict=True):
        # The product's last bit may differ, and then a rounding to float8.
        assert (one - other).norm() <= 5e-3 * other.norm()


def test_the_product_is_not_kept_and_its_gradient_is_in_float8(monkeypatch):
    mlp, sizes, gradients = Mlp(kernels.product), [], []
    plain = layer._PRODUCTS[False]
    noted = plain._replace(gradients=lambda dy: gradients.append(dy) or products.gradients(dy))
    monkeypatch.setitem(layer._PRODUCTS, False, noted)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.shape) or x, lambda x: x):
        y = mlp(torch.randn(2, 5, 32, device=DEVICE))
    assert sizes.count((2, 5, 48)) == 4  # gate and up, twice: of the product and of the projection
    y.sum().backward()
    assert len(gradients) == 1


def test_second_derivatives_are_those_of_the_formula():
    found = []
    for gated in (kernels.product, reference.product):
        mlp, x = Mlp(gated), torch.randn(3, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        (dx,) = torch.autograd.grad(mlp(x.requires_grad_()).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), mlp.up.weight)[0])
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_under_autocast_the_product_is_a_plain_operand(calls):
    mlp = Mlp(kernels.product)
    x = torch.randn(4, 32, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = mlp(x)
    y.float().sum().backward()
    assert not calls
    assert y.dtype is torch.bfloat16 and mlp.down.weight.grad.dtype is torch.float32
