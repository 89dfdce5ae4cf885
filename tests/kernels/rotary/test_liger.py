"""Liger's rotary kernel, where it is installed: through the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from veomni_hook.kernels.registry import registry
from veomni_hook.kernels.rotary import reference

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

from veomni_hook.kernels.rotary.liger import refuses, rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(cos_batch=1, dtype=torch.float32):
    q, k = (torch.randn(2, 5, heads, 16).to(DEVICE, dtype).transpose(1, 2) for heads in (3, 2))
    angle = torch.randn(cos_batch, 5, 8).repeat(1, 1, 2)
    return [q, k, angle.cos().to(q), angle.sin().to(q)]


def test_runs_only_if_asked_for():
    (kernel,) = (k for k in registry.kernels("rotary") if k.backend == "liger")
    assert (kernel.variant, kernel.automatic) == ("half_split", False)


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


def test_what_it_overwrites_cannot_be_used_in_a_backward():
    q, k, cos, sin = operands()
    x = q.detach().requires_grad_()
    turned = x * 1
    squares = turned.square()
    rotary(turned, k, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, c, s: [q, k, c.half(), s.half(), 1], "dtype of cos"),
        (lambda q, k, c, s: [q.transpose(1, 2), k.transpose(1, 2), c, s, 2], "Liger takes"),
        (lambda q, k, c, s: [q[0], k[0], c[0], s[0], 0], "Liger takes"),
        (lambda q, k, c, s: [q.detach().requires_grad_(), k, c, s, 1], "parameter"),
        (lambda q, k, c, s: [q, k, c[..., :8], s[..., :8], 1], "do not cover"),
    ],
)
def test_refuses(change, reason):
    assert refuses(None, *operands(), 1, reference.half_split) is None
    assert reason in refuses(None, *change(*operands()), reference.half_split)
