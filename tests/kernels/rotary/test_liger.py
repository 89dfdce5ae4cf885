"""Liger's rotary kernel, where it is installed: through the interpreter on a CPU, compiled on a GPU."""

import pytest
import torch

from tests.kernels.matching import DEVICE
from veomni_hook.errors import KernelError
from veomni_hook.kernels.rotary import reference

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

from veomni_hook.kernels.rotary.liger import refuses, rotary


def operands(cos_batch=1, dtype=torch.float32):
    q, k = (torch.randn(2, 5, heads, 16).to(DEVICE, dtype).transpose(1, 2) for heads in (3, 2))
    angle = torch.randn(cos_batch, 5, 8).repeat(1, 1, 2)
    return [q, k, angle.cos().to(q), angle.sin().to(q)]


@pytest.mark.parametrize("cos_batch", [1, 2])
@pytest.mark.parametrize("contiguous", [False, True])
def test_equals_the_reference(cos_batch, contiguous):
    q, k, cos, sin = operands(cos_batch)
    if contiguous:
        q, k = q.contiguous(), k.contiguous()
    found = []
    for function in (rotary, reference.half_split):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
        ys = function(*(leaf * 1 for leaf in leaves), cos, sin)
        torch.manual_seed(1)
        grads = torch.autograd.grad(ys, leaves, [torch.randn(y.shape).to(y) for y in ys])
        found.append([*ys, *grads])
    torch.testing.assert_close(*found)


class View(torch.autograd.Function):
    """Returns a view that is made inside, as norms of rows do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone().view(-1).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_takes_views_of_what_another_function_returned():
    q, k, cos, sin = operands()
    found = []
    for function in (rotary, reference.half_split):
        leaf = q.detach().clone().requires_grad_()
        turned, _ = function(View.apply(leaf.transpose(1, 2)).transpose(1, 2), k, cos, sin)
        turned.square().sum().backward()
        found.append((turned, leaf.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("contiguous", [False, True])
def test_overwrites_neither_operands_nor_gradients(contiguous):
    q, k, cos, sin = operands()
    if contiguous:
        q, k = q.contiguous(), k.contiguous()
    given = [q.requires_grad_(), k.requires_grad_(), cos, sin]
    before = [x.detach().clone() for x in given]
    versions = [x._version for x in given]
    ys = rotary(*given)
    kept, incoming = [], [torch.randn_like(y) for y in ys]
    held = [grad.clone() for grad in incoming]
    for y in ys:
        y.register_hook(kept.append)
        y.retain_grad()
    torch.autograd.backward(ys, incoming)
    # The later of two results is differentiated first.
    for found in (incoming, kept[::-1], [y.grad for y in ys]):
        assert all(map(torch.equal, found, held))
    assert all(map(torch.equal, given, before))
    assert [x._version for x in given] == versions


def test_what_it_turned_can_be_used_in_another_backward():
    q, k, cos, sin = operands()
    x = q.detach().requires_grad_()
    turned = x * 1
    squares = turned.square()
    rotary(turned, k, cos, sin)
    squares.sum().backward()
    torch.testing.assert_close(x.grad, 2 * q)


def test_has_no_second_derivatives():
    q, *others = operands()
    ys = rotary(q.requires_grad_(), *others)
    with pytest.raises(KernelError, match="rotary=liger"):
        torch.autograd.grad(ys[0].square().sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, c, s: [q, k, c.half(), s.half(), 1], "dtype of cos"),
        (lambda q, k, c, s: [q.transpose(1, 2), k.transpose(1, 2), c, s, 2], "Liger supports"),
        (lambda q, k, c, s: [q[0], k[0], c[0], s[0], 0], "Liger supports"),
        (lambda q, k, c, s: [q, k, c[..., :8], s[..., :8], 1], "do not match the columns"),
    ],
)
def test_refuses(change, reason):
    assert refuses(None, *operands(), 1, reference.half_split) is None
    assert reason in refuses(None, *change(*operands()), reference.half_split)
