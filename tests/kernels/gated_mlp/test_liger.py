"""Liger's gated activations, where it is installed: through the interpreter on a CPU, compiled on a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from tests.kernels.matching import DEVICE, close
from veomni_hook.kernels.gated_mlp import reference

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

from veomni_hook.kernels.gated_mlp.liger import product, refuses


@pytest.mark.skipif(DEVICE == "cpu", reason="these kernels of Liger do not run in the interpreter")
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("halves", [False, True])
def test_equals_the_reference(name, halves):
    gate, up = torch.randn(6, 64, device=DEVICE).chunk(2, dim=-1)
    if not halves:
        gate, up = gate.contiguous(), up.contiguous()
    dy, found = torch.randn(6, 32, device=DEVICE), []
    for function in (product, reference.product):
        leaves = [x.detach().clone().requires_grad_() for x in (gate, up)]
        y = function(*(leaf * 1 for leaf in leaves), ACT2FN[name])
        found.append([y, *torch.autograd.grad(y, leaves, dy.clone())])
    close(*found, 1e-5)


def test_operands_that_only_the_formula_takes():
    for gate, up in (
        (torch.randn(2, 4), torch.randn(1, 4)),
        (torch.randn(2, 4).double(), torch.randn(2, 4).double()),
        (torch.randn(2, 4).half(), torch.randn(2, 4)),
        (torch.randn(0, 4), torch.randn(0, 4)),
    ):
        assert torch.equal(product(gate, up, functional.silu), functional.silu(gate) * up)


@pytest.mark.parametrize("activation", [functional.silu, nn.SiLU(), ACT2FN["gelu_pytorch_tanh"]])
def test_takes(activation):
    assert refuses(None, torch.randn(2), activation) is None


@pytest.mark.parametrize(
    ("activation", "named"), [(functional.gelu, "gelu"), (nn.ReLU(), "relu"), (nn.Mish(), "Mish")]
)
def test_refuses(activation, named):
    assert named in refuses(None, torch.randn(2), activation)
